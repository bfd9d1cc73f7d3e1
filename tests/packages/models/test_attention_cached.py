"""Attention over caches by its formula: of continued rows, of rows of a group that share a prompt, and in parts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_kernels import attend_visible

from rlhf_core.models.attention_cached import CACHE_PART, attend_cached, attend_groups, cache_parts, cut


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (9, 2.0)], ids=str)
def test_attention_is_that_of_its_formula(window: int | None, softcap: float | None) -> None:
    batch, kv_heads, groups, time, size, entries = 2, 2, 3, 4, 5, 16
    rng = np.random.default_rng(1)
    q = rng.normal(size=(batch, kv_heads, groups, time, size))
    keys = rng.normal(size=(batch, kv_heads, size, entries))
    values = rng.normal(size=(batch, kv_heads, entries, size))
    positions = np.array([[0, 1, 2, 3], [9, 10, 11, 12]])
    logits = np.einsum("bkgth,bkhs->bkgts", q, keys)
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    age = positions[:, :, None] - np.arange(entries)
    seen = (age >= 0) & (age < (window or entries))
    weights = np.where(seen[:, None, None], np.exp(logits), 0)
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bkgts,bksh->btkgh", weights, values).reshape(batch, time, -1)
    arrays = (jnp.asarray(x, jnp.float32) for x in (q, keys, values))
    found = attend_cached(*arrays, jnp.asarray(seen), softcap)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "softcap", "kernel"),
    [
        (None, None, None),
        (4, 3.0, None),
        (2, 3.0, "gpu"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((None, 3.0, None), (4, None, None), (None, None, "gpu"), (2, 3.0, "tpu"))
        ),
    ],
)
def test_rows_of_a_group_see_their_prompt_and_themselves(
    window: int | None, softcap: float | None, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts, left-padded, one of them empty; four rows each, which have written three entries of five."""
    if kernel is not None:
        over = functools.partial(attend_visible, on=kernel, interpret=True)
        monkeypatch.setattr("rlhf_core.models.attention_cached.visible_kernel", lambda: over)
    prompts, group, heads, repeats, size, time, longest, step = 3, 4, 2, 3, 4, 6, 5, 2
    draw = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return 2 * draw.standard_normal(shape).astype(np.float32)

    q = normal(prompts * group, heads, repeats, size)
    read, written = normal(2, prompts, heads, time, size), normal(2, prompts * group, heads, longest, size)
    lengths = np.array([6, 2, 0])
    used = np.arange(time) >= time - lengths[:, None]
    before = np.maximum(np.cumsum(used, 1) - 1, 0)
    now = np.repeat(lengths, group) + step  # the position of each row's query
    near = np.broadcast_to(used[:, None], (prompts, group, time))
    own = np.arange(longest) <= step
    if window is not None:
        near = near & (now.reshape(prompts, group, 1) - before[:, None] < window)
        own = own & (step - np.arange(longest) < window)
    mixed = jax.jit(functools.partial(attend_groups, softcap=softcap))(
        q, (read[0].swapaxes(2, 3), read[1], near), (written[0].swapaxes(2, 3), written[1], own)
    )
    mixed = np.asarray(mixed)
    for row in range(prompts * group):
        prompt = row // group
        seen = np.r_[near[prompt, row % group], own]
        assert seen.sum() == (min(now[row] + 1, window) if window else now[row] + 1)
        for head in range(heads):
            keys, values = np.concatenate([read[:, prompt, head], written[:, row, head]], 1).astype(
                np.float64
            )
            logits = q[row, head].astype(np.float64) @ keys[seen].T
            logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
            p = np.exp(logits - logits.max(-1, keepdims=True))
            expected = p @ values[seen] / p.sum(-1, keepdims=True)
            found = mixed[row].reshape(heads, repeats, size)[head]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, True)])
def test_attention_over_the_parts_of_a_cache(softcap: float | None, sinks: bool) -> None:
    """To the bit the same for a row, however long the others are, and in parts that are arrays; that of the formula."""
    rng = np.random.default_rng(2)
    time, length = (1 if softcap is None else 3), 7 * CACHE_PART + 40
    shapes = ((3, 2, 2, time, 8), (3, 2, 8, length), (3, 2, length, 8))
    q, keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    sizes = cache_parts(length)
    assert sizes == (CACHE_PART, CACHE_PART, 2 * CACHE_PART, 3 * CACHE_PART, 40)
    more = {
        "softcap": softcap,
        "sinks": jnp.asarray(rng.normal(size=(2, 2)), jnp.bfloat16) if sinks else None,
    }
    over = jax.jit(functools.partial(attend_cached, in_order=True))
    first = None
    for last in (
        [30, -1, 7],
        [30, CACHE_PART + 40, 7],
        [30, 5 * CACHE_PART + 1, 7],
        [30, length - 1, 7],
    ):  # -1: a row that sees nothing
        until = np.array(last)[:, None] - np.arange(time)[::-1]
        seen = jnp.asarray(np.arange(length) <= until[..., None])
        found = np.asarray(over(q, keys, values, seen, **more))
        parted = over(q, cut(keys, sizes, 3), cut(values, sizes, 2), seen, **more)
        np.testing.assert_array_equal(found, parted)
        dense = np.asarray(attend_cached(q, keys, values, seen, **more))
        rows = np.array(last) >= 0
        np.testing.assert_allclose(found[rows], dense[rows], atol=1e-5)
        assert np.isfinite(found).all()
        first = found if first is None else first
        np.testing.assert_array_equal(found[[0, 2]], first[[0, 2]])
