"""Attention over the visible entries of a cache, by the kernels in interpret mode, equals the definition in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models.attention_decode import GPU_ENTRIES, MASKED, TPU_ENTRIES, attend_visible

BLOCKS = {"gpu": GPU_ENTRIES, "tpu": TPU_ENTRIES}
SHAPES = [(1, 1, 1, 128), (2, 1, 4, 64), (3, 2, 8, 80), (1, 3, 3, 256)]
"""Rows, kv heads, query heads per kv head, head size."""


def inputs(shape: tuple[int, int, int, int], entries: int) -> list[np.ndarray]:
    rows, kv_heads, repeats, size = shape
    draw = np.random.default_rng(0)
    shapes = [
        (rows, kv_heads, repeats, size),
        (rows, kv_heads, size, entries),
        (rows, kv_heads, entries, size),
    ]
    queries, keys, values = (draw.standard_normal(shape) for shape in shapes)
    return [queries * 3 / np.sqrt(size), keys, values]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", BLOCKS)
def test_only_visible_entries_count(kernel: str, shape: tuple[int, int, int, int]) -> None:
    """Nothing, one entry, whole blocks, one more or less than them, everything; a window's beginning; soft caps."""
    block = BLOCKS[kernel]
    entries = 2 * block + 24  # no block divides it
    queries, keys, values = inputs(shape, entries)
    ends = (0, 1, block - 1, block, block + 1, entries)
    runs = [(0, end, None) for end in ends]
    runs += [(block, block + 1, 2.0), (5, 2 * block, 2.0), (block + 7, entries, None)]
    for first, end, softcap in runs:
        hidden = np.r_[0:first, end:entries]
        # What must not be read would show.
        poisoned = keys.copy(), values.copy()
        poisoned[0][..., hidden], poisoned[1][:, :, hidden] = np.nan, 1e30
        if kernel == "tpu":  # reads whole blocks, which hold numbers everywhere
            poisoned = keys.copy(), values.copy()
            poisoned[0][..., hidden], poisoned[1][:, :, hidden] = 50.0, 1e6
        arrays = (jnp.asarray(x, jnp.float32) for x in (queries, *poisoned))
        found = attend_visible(*arrays, jnp.int32(first), jnp.int32(end), softcap, on=kernel, interpret=True)
        logits = np.einsum("bkrh,bkht->bkrt", queries, keys[..., first:end])
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        highest = logits.max(-1, initial=MASKED)
        weights = np.exp(logits - highest[..., None])
        expected = np.einsum("bkrt,bkth->bkrh", weights, values[:, :, first:end]), highest, weights.sum(-1)
        for name, x, y in zip(("output", "maximum", "sum"), found, expected, strict=True):
            assert x.dtype == jnp.float32
            message = f"{name}, entries {first} to {end}"
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=message)
