"""Every attention equals the definition: softmax over the keys that a query sees, value and gradient, in float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.contracts import ATTENTION
from rlhf_core.models import in_blocks
from rlhf_core.plugins import installed_registry

ROWS, KV_HEADS, GROUPS, SIZE = 2, 2, 2, 4
REGISTRY = installed_registry()
WAYS = {
    "xla": REGISTRY.get(ATTENTION, "xla"),
    "blocks": REGISTRY.get(ATTENTION, "blocks"),
    "blocks of 32": in_blocks(32),
    "cudnn": REGISTRY.get(ATTENTION, "cudnn", implementation="xla"),
}


def trees(time: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and visible_until of two rows: a prompt with three branches, then unused; three sequences."""
    first = np.zeros((2, time), np.int32)
    prompt, end = time // 5, time - 3
    cuts = np.linspace(prompt, end, 4).astype(int)
    first[0, :prompt], first[1, :prompt] = np.arange(prompt), end
    for start, stop in itertools.pairwise(cuts):
        first[0, start:stop], first[1, start:stop] = np.arange(stop - start) + prompt, stop
    second = np.zeros((2, time), np.int32)
    cuts = np.linspace(0, time, 4).astype(int)
    for start, stop in itertools.pairwise(cuts):
        second[0, start:stop], second[1, start:stop] = np.arange(stop - start), stop
    positions, until = np.stack([first, second], 1)
    return positions, until


def inputs(time: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Queries, keys and values, large enough to make sharp softmaxes; and a cotangent."""
    draw = np.random.default_rng(seed)
    shapes = [(ROWS, KV_HEADS, GROUPS, time, SIZE), *[(ROWS, KV_HEADS, time, SIZE)] * 2]
    arrays = [2 * draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    return arrays, draw.standard_normal((ROWS, time, KV_HEADS * GROUPS * SIZE)).astype(np.float32)


def expected(
    arrays: list[np.ndarray],
    cotangent: np.ndarray,
    positions: np.ndarray,
    until: np.ndarray,
    window: int | None,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The mixed values and the gradients of all three, and of the sinks if there are any, written out."""
    q, k, v = (x.astype(np.float64) for x in arrays)
    time = q.shape[3]
    index = np.arange(time)
    seen = (index <= index[:, None]) & (index[:, None] < until[:, None, :])
    if window is not None:
        seen &= positions[:, :, None] - positions[:, None, :] < window
    raw = np.einsum("bkgth,bksh->bkgts", q, k)
    logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top) * seen[:, None, None]
    sink = 1e-300 if sinks is None else np.exp(sinks.astype(np.float64)[..., None, None] - top)
    total = weights.sum(-1, keepdims=True) + sink
    p = weights / total
    mixed = np.einsum("bkgts,bksh->bkgth", p, v)
    d = cotangent.astype(np.float64).reshape(ROWS, time, KV_HEADS, GROUPS, SIZE).transpose(0, 2, 3, 1, 4)
    d_p = np.einsum("bkgth,bksh->bkgts", d, v)
    d_logits = p * (d_p - (p * d_p).sum(-1, keepdims=True))
    if softcap is not None:
        d_logits *= 1 - np.tanh(raw / softcap) ** 2
    gradients = (
        np.einsum("bkgts,bksh->bkgth", d_logits, k),
        np.einsum("bkgts,bkgth->bksh", d_logits, q),
        np.einsum("bkgts,bkgth->bksh", p, d),
    )
    if sinks is not None:
        d_sinks = -(sink / total * (p * d_p).sum(-1, keepdims=True)).sum((0, 3, 4))
        gradients = (*gradients, d_sinks)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(ROWS, time, -1), gradients


PLAIN, NEAR, BOTH = (96, None, None), (200, 17, None), (150, 30, 2.0)


@pytest.mark.parametrize(
    ("way", "case"),
    [
        *(("xla", PLAIN), ("xla", BOTH)),
        *(("blocks", PLAIN), ("blocks", BOTH)),
        ("blocks of 32", BOTH),
        *(("cudnn", PLAIN), ("cudnn", NEAR)),
    ],
)
def test_value_and_gradient(way: str, case: tuple[int, int | None, float | None]) -> None:
    """With sinks where there is a soft cap."""
    time, window, softcap = case
    positions, until = trees(time)
    arrays, cotangent = inputs(time)
    cotangent[until == 0] = 0  # what an unused slot holds is nobody's business
    sinks = None
    if softcap is not None:
        sinks = np.random.default_rng(1).normal(size=(KV_HEADS, GROUPS)).astype(np.float32)
    value, gradients = expected(arrays, cotangent, positions, until, window, softcap, sinks)

    @jax.jit
    def run(*given: Any) -> Any:
        wide = None if window is None else jnp.int32(window)
        call = functools.partial(WAYS[way], window=wide, softcap=softcap)

        def over(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
            more = {"sinks": sinks[0]} if sinks else {}
            return call(q, k, v, jnp.asarray(positions), jnp.asarray(until), **more)

        mixed, back = jax.vjp(over, *given)
        return mixed, back(jnp.asarray(cotangent))

    found, found_gradients = run(*arrays, *([] if sinks is None else [sinks]))
    assert np.isfinite(found).all()
    assert not way.startswith("blocks") or not np.asarray(found)[until == 0].any()
    np.testing.assert_allclose(found[until > 0], value[until > 0], rtol=1e-4, atol=2e-5)
    for one, other in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-4)
