"""Cached tokens that are continued by several: the hidden states of the full forward pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_kernels import attend_visible

from rlhf_core.models import Definition
from rlhf_core.models.attention_cached import attend_cached, attend_groups
from rlhf_core.sampling.loop import empty_cache, time_axes
from tests.shared.decoder_configs import CONFIGS, defined
from tests.shared.drawn import params_of

VOCAB, LENGTH = 37, 64
WINDOW = {"sliding_window": 8, "rms_norm_eps": 0.01}  # without it, norms of short vectors enlarge rounding
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "mixtral", "qwen3_5", "lfm2")},
    **{name: CONFIGS[name] | {"sliding_window": 8} for name in ("mistral, yarn", "gemma2", "gemma3")},
    "gemma4": CONFIGS["gemma4, shared keys"] | WINDOW,
}
KEPT = ("gemma3", "gemma4", "qwen3_5")
"""Windows and several rotary embeddings, keys and values of other layers, states: what `extend` passes on by itself."""


def used(definition: Definition, params: Any, rows: int) -> Any:
    """Make a cache that other tokens have used before."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    read = jax.eval_shape(definition.prefill, params, one, one, one)[1]
    return jax.tree.map(jnp.ones_like, empty_cache(read, time_axes(definition), rows, LENGTH))


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
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
    plain = (params,) if name == KEPT[0] else ()
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
