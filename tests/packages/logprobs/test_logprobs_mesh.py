"""Log-probabilities on eight devices: values and gradients against float64 NumPy, and what the devices send."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rlhf_core.logprobs import token_logps, token_moments
from rlhf_core.mesh import (
    ROW_AXES,
    abstract_rows,
    make_mesh,
    param_shardings,
    put_rows,
    replicated_sharding,
    row_sharding,
)
from tests.shared import logprob_cases as cases
from tests.shared.sent import sent

HALF = jnp.bfloat16
KINDS = {
    "float32": (jnp.float32, jnp.float32, False),
    "float32, tied": (jnp.float32, jnp.float32, True),
    "bfloat16 states": (HALF, jnp.float32, False),
    "bfloat16, tied": (HALF, HALF, True),
}
"""dtype of hidden and of the kernel, and whether that is the transpose of an embedding."""
MIXED = (2, 2, 2)
"""A mesh: data, fsdp, tensor."""
COVERING = [
    (MIXED, "float32", 32),
    *((MIXED, kind, 32) for kind in ("bfloat16 states", "bfloat16, tied")),
    (MIXED, "float32, tied", 31),
    *(pytest.param(shape, "float32", 32, marks=pytest.mark.long) for shape in ((1, 1, 8), (4, 1, 2))),
]
"""Every kind of arrays on the mesh of all axes, and words that `tensor` does not divide."""
NAMES = ("logps", "entropies", "d_hidden", "d_kernel")


def shardings(mesh: Any, weights: Any, tied: bool) -> Any:
    """Of a kernel [D, V] or an embedding [V, D], as a model's."""
    return param_shardings(mesh, ("vocab", "embed") if tied else ("embed", "vocab"), weights)


def total(
    hidden: Any, weights: Any, targets: Any, g: Any, h: Any, *, tied: bool, **options: Any
) -> tuple[Any, Any]:
    logps, entropies = token_logps(
        hidden, weights.T if tied else weights, targets, entropy=True, temperature=1.3, softcap=2.5, **options
    )
    return jnp.sum(logps * g + entropies * h), (logps, entropies)


def assert_equal(actual: Any, expected: Any, dtype: Any) -> None:
    """To float32 rounding, gradients in bfloat16 to its own."""
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        tolerance = 0.03 * np.abs(b).max() if dtype == HALF and name.startswith("d_") else 3e-5
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2e-5, atol=tolerance, err_msg=name)


def program(mesh: Any, tied: bool, rows: Any, weights: Any, **options: Any) -> Any:
    """The compiled value and gradients; rows: hidden, targets and the results' cotangents."""
    spread = shardings(mesh, weights, tied)
    step = jax.value_and_grad(partial(total, tied=tied, **options), argnums=(0, 1), has_aux=True)
    jitted = jax.jit(step, out_shardings=(None, (row_sharding(mesh), spread)))
    weights = jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=spread)
    hidden, *others = abstract_rows(mesh, rows)
    return jitted.lower(hidden, weights, *others).compile()


@pytest.mark.parametrize(("shape", "kind", "vocab"), COVERING, ids=str)
def test_values_and_gradients_equal_float64(shape: tuple[int, int, int], kind: str, vocab: int) -> None:
    """Chunks of 3, 3 and 1 tokens a row."""
    dtype, kernel_dtype, tied = KINDS[kind]
    hidden, kernel, *rest = cases.problem(dtype, rows=8, vocab=vocab)
    kernel = kernel.astype(kernel_dtype)
    expected = cases.reference(hidden, kernel, *rest, 1.3, 2.5)
    mesh = make_mesh(*shape)
    rows = hidden, rest[0], *(x.astype(np.float32) for x in rest[1:])
    weights = kernel.T if tied else kernel
    hidden, *others = put_rows(mesh, rows)
    compiled = program(mesh, tied, rows, weights, at_once=("tokens", 3))
    weights = jax.device_put(weights, shardings(mesh, weights, tied))
    (_, results), (d_hidden, d_weights) = compiled(hidden, weights, *others)
    assert d_weights.dtype == kernel_dtype
    assert_equal((*results, d_hidden, d_weights.T if tied else d_weights), expected, dtype)


def test_moments_of_words_on_several_devices_equal_float64() -> None:
    hidden, kernel, targets, *_ = cases.problem(rows=8, vocab=32)
    mesh = make_mesh(*MIXED)
    placed = jax.device_put(kernel, shardings(mesh, kernel, tied=False))
    compute = partial(token_moments, temperature=1.3, softcap=2.5, at_once=("tokens", 3))
    found = jax.jit(compute)(put_rows(mesh, hidden), placed, put_rows(mesh, targets))
    expected = cases.moments(hidden, kernel, targets, 1.3, 2.5)
    for name, values in found.named().items():
        np.testing.assert_allclose(values, expected[name], atol=3e-5, rtol=3e-5, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "rows", "mapped"),
    [((8, 1, 1), 4, False), (MIXED, 32, True)],
    ids=["too few", "within shard_map"],
)
def test_rows_that_the_compiler_cannot_spread(shape: tuple[int, int, int], rows: int, mapped: bool) -> None:
    """Four on eight devices; and those that the caller has spread itself, of which each of four parts has eight."""
    mesh, arrays = make_mesh(*shape), cases.problem(rows=rows)
    expected = cases.reference(*arrays, 1.3, 2.5)
    placed = jax.device_put(arrays, replicated_sharding(mesh))
    logps_of = partial(token_logps, entropy=True, temperature=1.3, softcap=2.5, at_once=("tokens", 3))
    if mapped:
        parts = PartitionSpec(ROW_AXES)
        logps_of = jax.shard_map(
            logps_of,
            mesh=mesh,
            in_specs=(parts, PartitionSpec(), parts),
            out_specs=parts,
            axis_names=set(ROW_AXES),
            check_vma=False,
        )

    @partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradients(hidden: Any, kernel: Any, targets: Any, g: Any, h: Any) -> Any:
        logps, entropies = logps_of(hidden, kernel, targets)
        return jnp.sum(logps * g + entropies * h), (logps, entropies)

    found, results = jax.jit(gradients)(*placed)
    assert_equal((*results, *found), expected, jnp.float32)


@pytest.mark.parametrize(
    ("shape", "tied"),
    [
        ((1, 1, 8), False),
        (MIXED, False),
        ((1, 8, 1), True),
        *(pytest.param(shape, True, marks=pytest.mark.long) for shape in ((4, 1, 2), (1, 2, 4), MIXED)),
    ],
    ids=str,
)
def test_the_head_is_gathered_and_its_gradient_summed_once_a_pass(
    shape: tuple[int, int, int], tied: bool
) -> None:
    """What eight chunks send is what one does: a device's words of the head, and of `tensor` a few numbers a token."""
    rows, length, dim, vocab = 8, 24, 64, 512
    data, fsdp, tensor = shape
    mesh = make_mesh(*shape)
    numbers = np.zeros((rows, length), np.float32)
    arrays = np.zeros((rows, length, dim), np.float32), numbers.astype(np.int32), numbers, numbers
    weights = np.zeros((vocab, dim) if tied else (dim, vocab), np.float32)
    one, many = (
        sent(program(mesh, tied, arrays, weights, at_once=("tokens", chunk))) for chunk in (length, 3)
    )
    assert many == one
    head = 4 * dim * vocab / tensor
    assert many.pop("all-gather", 0) == (head if fsdp > 1 else 0)
    # The gradient of hidden states, and the largest logit, the sums of exp and of the entropy, and the target's.
    tokens = rows * length // (data * fsdp) * 4 * (dim + 4) if tensor > 1 else 0
    summed = tokens + (head if tensor < 8 else 0)
    assert summed <= sum(many.values()) <= summed + 4  # the loss
