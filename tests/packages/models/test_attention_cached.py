"""Attention over caches: continued ones give what the full pass does; so do their parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models import Definition
from rlhf_core.models.attention_cached import (
    CACHE_PART,
    attend_cached,
    cache_parts,
    cut,
)
from tests.shared.decoder_configs import CONFIGS, defined
from tests.shared.drawn import params_of

VOCAB, LENGTH = 37, 64
WINDOW = {"sliding_window": 8, "rms_norm_eps": 0.01}  # without it, norms of short vectors enlarge rounding
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": CONFIGS["gemma3"] | {"sliding_window": 8},
    "gemma4": CONFIGS["gemma4, shared keys"] | WINDOW,
    "qwen3_5": CONFIGS["qwen3_5"],
}
"""Windows and several rotary embeddings, keys and values of other layers, states: what `extend` passes on by itself.
Conversations of other families: tests/packages/sampling/test_conversations.py."""


def used(definition: Definition, params: Any, rows: int) -> Any:
    """Make a cache that other tokens have used before."""
    one = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    read = jax.eval_shape(definition.prefill, params, one, one, one)[1]
    cache = jax.eval_shape(lambda read: definition.ring(read, LENGTH, 0), read)
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_single_tokens_give_the_hidden_states_of_the_whole(name: str) -> None:
    """Three rows at places of their own; padding behind a chunk is overwritten; plain parameters of one family, too."""
    definition = defined(FAMILIES[name], "lm")
    params = params_of(definition, 0, 0.3)
    extend, decode = jax.jit(definition.extend), jax.jit(definition.decode)
    # Short outputs of the delta rule are normalised, which magnifies what parameters are rounded by as much.
    bound = 2e-4 if name == "qwen3_5" else 2e-5
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    expected = np.asarray(jax.jit(definition.hidden)(params, tokens, positions, np.full_like(tokens, LENGTH)))
    plain = (params,) if name == "gemma3" else ()
    for weights in (*plain, definition.prepare(params)):
        cache, start = used(definition, params, 3), np.zeros(3, np.int32)
        for lengths in ((7, 16, 1), (16, 3, 9), (2, 11, 16)):
            chunk = rng.integers(0, VOCAB, (3, 16)).astype(np.int32)
            for row, n in enumerate(lengths):
                chunk[row, :n] = tokens[row, start[row] : start[row] + n]
            hidden, cache = extend(weights, cache, chunk, start, np.array(lengths, np.int32))
            for row, n in enumerate(lengths):
                states = expected[row, start[row] : start[row] + n]
                np.testing.assert_allclose(hidden[row, :n], states, atol=bound)
            start = start + np.array(lengths, np.int32)
        for _ in range(3):
            visible = np.arange(LENGTH) <= start[:, None]
            step = tokens[np.arange(3), start]
            hidden, cache = decode(weights, cache, step, start, visible, start)
            np.testing.assert_allclose(hidden, expected[np.arange(3), start], atol=bound)
            start = start + 1


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
    over = jax.jit(partial(attend_cached, in_order=True))
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
