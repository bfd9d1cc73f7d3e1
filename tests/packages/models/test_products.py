"""Products in bfloat16: what is summed for a kernel's gradient is not rounded to bfloat16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models.experts import ACTIVATIONS, _kernel_gradient, expert_product
from rlhf_core.models.experts_pallas_gpu import expert_rows
from rlhf_core.models.layers import product

DRAW = np.random.default_rng(2)
COUNTS = np.array([30, 0, 90], np.int32)


def draw(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(DRAW.normal(size=shape), dtype)


@pytest.mark.parametrize("experts", [False, True])
def test_the_gradient_of_a_kernel_is_float32(experts: bool) -> None:
    """Against float64, from the same bfloat16 inputs: rounding to bfloat16 would be wrong by up to 2⁻⁹."""
    x, d_y = draw(120, 16), draw(120, 8)
    kernel = draw(*((3,) if experts else ()), 16, 8, dtype=jnp.float32)
    parts = np.split(np.arange(120), np.cumsum(COUNTS)[:-1]) if experts else [np.arange(120)]

    def compute(x: Any, kernel: Any) -> Any:
        return (
            expert_product(x, kernel, jnp.asarray(COUNTS))
            if experts
            else product(x, kernel, ("embed", "mlp"))
        )

    y, pull = jax.vjp(compute, x, kernel)
    d_x, d_kernel = pull(d_y)
    assert (y.dtype, d_x.dtype, d_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = [np.asarray(a, np.float64) for a in (x, kernel.astype(jnp.bfloat16), d_y)]
    kernels = exact[1] if experts else exact[1][None]
    expected = [(exact[0][at] @ k, exact[2][at] @ k.T) for at, k in zip(parts, kernels, strict=True)]
    for found, wanted in zip((y, d_x), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), np.concatenate(wanted), rtol=0.01, atol=0.02
        )
    wanted = np.stack([exact[0][at].T @ exact[2][at] for at in parts])
    np.testing.assert_allclose(d_kernel, wanted if experts else wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_compute_the_products_of_experts(dtype: str) -> None:
    """In interpret mode, against float64: odd sizes, an expert without rows, rows behind the last expert's."""
    draw, counts = np.random.default_rng(0), np.array([37, 0, 5, 21], np.int32)
    used, ids = counts.sum(), np.repeat(np.arange(4), counts)
    x, w, d_y = (draw.normal(size=s).astype(dtype) for s in ((70, 40), (4, 40, 136), (70, 136)))
    wide, kernels, d_wide = (np.asarray(each, np.float64) for each in (x, w, d_y))
    wanted = (
        np.stack([wide[i] @ kernels[e] for i, e in enumerate(ids)]),
        np.stack([d_wide[i] @ kernels[e].T for i, e in enumerate(ids)]),
        *[np.stack([wide[:used][ids == e].T @ d_wide[:used][ids == e] for e in range(4)])] * 2,
    )
    found = (
        expert_rows(x, w, counts, interpret=True)[:used],
        expert_rows(d_y, w, counts, transposed=True, interpret=True)[:used],
        _kernel_gradient(x, d_y, counts, "gpu", interpret=True),
        _kernel_gradient(x, d_y, counts, "tpu", interpret=True),
    )
    rounded = (1, 1, 1e-3, 1e-3) if dtype == "bfloat16" else (1e-3,) * 4
    for a, b, tolerance in zip(found, wanted, rounded, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, rtol=0, atol=5e-3 * tolerance * np.abs(b).max()
        )


def test_the_activation_does_not_cancel() -> None:
    """Its error is relative to its value, and that of its slope likewise, where both are small."""
    x = np.linspace(-5, 5, 1001)
    u, slope = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    sigmoid = 1 / (1 + np.exp(-2 * u))
    y, d_y = x * sigmoid, sigmoid + 2 * x * sigmoid * (1 - sigmoid) * slope
    activation = jax.vmap(jax.value_and_grad(ACTIVATIONS["gelu_pytorch_tanh"]))
    found, d_found = activation(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, y, rtol=1e-5)
    np.testing.assert_allclose(d_found, d_y, rtol=1e-5, atol=2e-7)
