"""Prefill, decoding with a cache and its continuation by chunks, against the whole forward pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models import Decoder, Definition
from tests.shared.decoder_configs import CONFIGS, defined
from tests.shared.drawn import params_of

FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("llama", "qwen2 with windows", "mistral, yarn", "gemma2", "gemma3")},
    **{name: CONFIGS[name] for name in ("phi3", "ministral3", "smollm3", "mixtral", "qwen3_5", "lfm2")},
    "gemma4": CONFIGS["gemma4, shared keys"] | FOUR | {"num_kv_shared_layers": 2},
}
KEPT = ("gemma2", "gemma4", "phi3", "qwen3_5")
"""Windows and soft caps; heads of two sizes, keys and values of other layers; fused projections; states. Several rotary
embeddings are continued below."""
hidden = jax.jit(Decoder.hidden, static_argnums=0)
prepare = jax.jit(Decoder.prepare, static_argnums=0)
prefill = jax.jit(Decoder.prefill, static_argnums=0)
ring = jax.jit(Decoder.ring, static_argnums=(0, 2))
decode = jax.jit(Decoder.decode, static_argnums=0)
decode_groups = jax.jit(Decoder.decode_groups, static_argnums=0)


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_prefill_and_both_ways_to_decode_equal_the_whole_forward_pass(name: str) -> None:
    """In rings with a copy of the prompt, and with one cache per prompt for its three completions."""
    model = defined(FAMILIES[name], "lm")
    params = params_of(model, 0, 0.3)
    draw = np.random.default_rng(0)
    lengths, time, copies, steps = np.array([5, 2]), 5, 3, 5
    prompts = draw.integers(0, 37, (2, time)).astype(np.int32)
    completions = draw.integers(0, 37, (2 * copies, steps)).astype(np.int32)
    length, first = time + steps, time + 2  # three slots up to the ring's end, then round
    mask = np.arange(time)[None] >= time - lengths[:, None]  # left-padded
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0).astype(np.int32)
    until = np.where(mask, time, 0).astype(np.int32)

    states, read = prefill(model, params, prompts, positions, until)
    for i, source in enumerate(model.config.sources):
        kind = model.config.at(i)[0]
        c = model.config.stacks[kind].config
        if source == i and kind not in ("linear_attention", "conv"):
            keys, values = read.layers[i]
            assert keys.shape == (2, c.num_kv_heads, c.head_dim, time)
            assert values.shape == (2, c.num_kv_heads, time, c.head_dim)
        assert (read.layers[i] is None) == (source != i)
    copied = jax.tree.map(lambda x: np.repeat(x, copies, axis=0), read)
    own, longer = (model.ring(copied, size, 0) for size in (steps, length))
    # Of a cache that does not grow with its length, states, completions begin with the prompt's.
    own = jax.tree.map(lambda x, y: x if x.shape == y.shape else jnp.zeros_like(x), own, longer)

    cache = ring(model, copied, length, np.int32(first))
    found, of_groups, prepared = [], [], prepare(model, params)
    for i in range(steps):
        slot = (first + i) % length
        at = np.repeat(lengths, copies).astype(np.int32) + i
        seen = (slot - np.arange(length)) % length <= at[:, None]
        state, cache = decode(model, prepared, cache, completions[:, i], at, seen, np.int32(slot))
        found.append(np.asarray(state))
        state, own = decode_groups(model, prepared, read, mask, own, completions[:, i], at, np.int32(i))
        of_groups.append(np.asarray(state))
    for each in (decode, decode_groups):
        assert each._cache_size() <= len(FAMILIES)  # the slot is traced: no compilation a step

    whole = np.zeros((2 * copies, length), np.int32)
    ends, place = np.repeat(lengths, copies)[:, None] + steps, np.arange(length, dtype=np.int32)[None]
    for row, completion in enumerate(completions):
        text = np.r_[prompts[row // copies][mask[row // copies]], completion]
        whole[row, : len(text)] = text
    places, until = np.broadcast_to(place, whole.shape), np.where(place < ends, ends, 0).astype(np.int32)
    expected = np.asarray(hidden(model, params, whole, places, until))
    for row, (end,) in enumerate(ends):
        prompt = states[row // copies][mask[row // copies]]
        np.testing.assert_allclose(prompt, expected[row, : end - steps], rtol=1e-4, atol=1e-5)
        for each in (found, of_groups):
            decoded = np.stack(each, 1)[row]
            np.testing.assert_allclose(decoded, expected[row, end - steps : end], rtol=1e-4, atol=1e-5)


VOCAB, LENGTH = 37, 64
WINDOW = {"sliding_window": 8, "rms_norm_eps": 0.01}  # without it, norms of short vectors enlarge rounding
EXTENDED: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "mixtral", "qwen3_5", "lfm2")},
    **{name: CONFIGS[name] | {"sliding_window": 8} for name in ("mistral, yarn", "gemma2", "gemma3")},
    "gemma4": CONFIGS["gemma4, shared keys"] | WINDOW,
}
EXTENDED_KEPT = ("gemma3", "gemma4", "qwen3_5")
"""Windows and several rotary embeddings, keys and values of other layers, states: what `extend` passes on by itself."""


def used(definition: Definition, params: Any, rows: int) -> Any:
    """Make a cache that other tokens have used before."""
    one = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    read = jax.eval_shape(definition.prefill, params, one, one, one)[1]
    cache = jax.eval_shape(lambda read: definition.ring(read, LENGTH, 0), read)
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), cache)


@pytest.mark.parametrize(
    "name",
    [name if name in EXTENDED_KEPT else pytest.param(name, marks=pytest.mark.long) for name in EXTENDED],
)
def test_chunks_and_single_tokens_give_the_hidden_states_of_the_whole(name: str) -> None:
    """Three rows at places of their own; padding behind a chunk is overwritten; plain parameters of one family, too."""
    definition = defined(EXTENDED[name], "lm")
    params = params_of(definition, 0, 0.3)
    extend, decode = jax.jit(definition.extend), jax.jit(definition.decode)
    # Short outputs of the delta rule are normalised, which magnifies what parameters are rounded by as much.
    bound = 2e-4 if name == "qwen3_5" else 2e-5
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    expected = np.asarray(jax.jit(definition.hidden)(params, tokens, positions, np.full_like(tokens, LENGTH)))
    plain = (params,) if name == EXTENDED_KEPT[0] else ()
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
