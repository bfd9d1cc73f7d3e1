"""The decoder against one written here in float64 NumPy, a token at a time where that is plainest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models import decoder
from rlhf_core.models.attention import attend, query_block
from rlhf_core.models.config import DecoderConfig, parse

hidden = jax.jit(decoder.hidden, static_argnums=0)
BASE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 40,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama"},
    "llama with biases": BASE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, all heads": BASE | {"model_type": "llama", "num_key_value_heads": 4, "hidden_act": "gelu"},
    "llama3 rope": BASE | {"model_type": "llama", "rope_scaling": LLAMA3},
    "linear rope": BASE
    | {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
    },
    "qwen2": BASE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 with windows": BASE
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
}


def make(name: str, **changes: Any) -> tuple[DecoderConfig, dict[str, Any]]:
    """A config and parameters in which nothing is 0 or 1, so that no term can be left out unnoticed."""
    config = dataclasses.replace(parse(CONFIGS[name]), **changes)
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.2 + 0.3 * draw.standard_normal(x.shape), jnp.float32),
        decoder.abstract(config),
    )
    return config, params


def reference_hidden(
    hf: dict[str, Any], params: Any, tokens: np.ndarray, positions: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """Hidden states float64 [T, D] of one row; seen bool [T, T]: query, key."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    size = hf.get("head_dim", hf["hidden_size"] // heads)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + hf["rms_norm_eps"]) * weight

    def linear(x: np.ndarray, group: dict[str, np.ndarray], layer: int) -> np.ndarray:
        return x @ group["kernel"][layer] + (group["bias"][layer] if "bias" in group else 0.0)

    def activation(x: np.ndarray) -> np.ndarray:
        if hf.get("hidden_act") == "gelu":
            return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return x / (1 + np.exp(-x))

    def turn(x: np.ndarray) -> np.ndarray:  # [T, heads, size]: a pair of dimensions as a complex number
        table = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = table.get("rope_theta", hf["rope_theta"])
        frequency = np.array([theta ** (-2 * i / size) for i in range(size // 2)])
        if table.get("rope_type") == "linear":
            frequency /= table["factor"]
        if table.get("rope_type") == "llama3":
            low, high = table["low_freq_factor"], table["high_freq_factor"]
            for i, f in enumerate(frequency):
                length = 2 * math.pi / f
                original = table["original_max_position_embeddings"]
                if length > original / low:
                    frequency[i] = f / table["factor"]
                elif length >= original / high:
                    smooth = (original / length - low) / (high - low)
                    frequency[i] = (1 - smooth) * f / table["factor"] + smooth * f
        pair = x[..., : size // 2] + 1j * x[..., size // 2 :]
        pair = pair * np.exp(1j * positions[:, None, None] * frequency)
        return np.concatenate([pair.real, pair.imag], -1)

    x = p["embed_tokens"]["embedding"][tokens]
    stack = p["layers"]
    for i in range(hf["num_hidden_layers"]):
        h = norm(x, stack["input_layernorm"]["weight"][i])
        attention = stack["self_attn"]
        q = linear(h, attention["q_proj"], i).reshape(len(x), heads, size)
        k = linear(h, attention["k_proj"], i).reshape(len(x), kv_heads, size)
        v = linear(h, attention["v_proj"], i).reshape(len(x), kv_heads, size)
        if "q_norm" in attention:
            q, k = norm(q, attention["q_norm"]["weight"][i]), norm(k, attention["k_norm"]["weight"][i])
        q, k = turn(q), turn(k)
        near = seen
        if hf.get("use_sliding_window") and i >= hf["max_window_layers"]:
            near = seen & (positions[:, None] - positions[None] < hf["sliding_window"])
        mixed = np.zeros((len(x), heads, size))
        for head in range(heads):
            source = head // (heads // kv_heads)
            for t in range(len(x)):
                keys = np.flatnonzero(near[t])
                if not len(keys):
                    continue
                logit = k[keys, source] @ q[t, head] / math.sqrt(size)
                weight = np.exp(logit - logit.max())
                mixed[t, head] = weight @ v[keys, source] / weight.sum()
        x = x + linear(mixed.reshape(len(x), -1), attention["o_proj"], i)
        h = norm(x, stack["post_attention_layernorm"]["weight"][i])
        gate = activation(linear(h, stack["mlp"]["gate_proj"], i))
        x = x + linear(gate * linear(h, stack["mlp"]["up_proj"], i), stack["mlp"]["down_proj"], i)
    return norm(x, p["norm"]["weight"])


def visible(until: np.ndarray) -> np.ndarray:
    """[T, T] query, key, straight from the definition: k <= q < visible_until[k]."""
    time = len(until)
    return np.array([[k <= q < until[k] for k in range(time)] for q in range(time)])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_hidden_and_head_equal_the_reference(name: str) -> None:
    config, params = make(name)
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, config.vocab_size, (2, 14)).astype(np.int32)
    # Row 0: unused, then a tree of a prompt of 4 and branches of 3 and 4. Row 1: two sequences, then unused.
    until = np.array([[0] + [12] * 4 + [8] * 3 + [12] * 4 + [0] * 2, [5] * 5 + [12] * 7 + [0] * 2], np.int32)
    positions = np.array([[0, 0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 0, 0], [*range(5), *range(7), 0, 0]], np.int32)
    used = until > 0
    found = np.asarray(hidden(config, params, tokens, positions, until))
    assert np.isfinite(found).all()
    for row in range(2):
        expected = reference_hidden(CONFIGS[name], params, tokens[row], positions[row], visible(until[row]))
        np.testing.assert_allclose(found[row][used[row]], expected[used[row]], rtol=2e-4, atol=2e-5)
    kernel, cap = decoder.unembedding(config, params)
    assert cap is None
    source = params["embed_tokens"]["embedding"].T if config.tied else params["lm_head"]["kernel"]
    np.testing.assert_array_equal(kernel, source)


@pytest.mark.parametrize("time", [128, 129, 300])
def test_query_blocks_change_nothing(time: int) -> None:
    draw = np.random.default_rng(2)
    q = draw.standard_normal((2, 2, 2, time, 4)).astype(np.float32)
    k, v = (draw.standard_normal((2, 2, time, 4)).astype(np.float32) for _ in range(2))
    until = draw.integers(0, time + 1, (2, time)).astype(np.int32)
    positions = np.tile(np.arange(time, dtype=np.int32), (2, 1))
    found = np.asarray(attend(*map(jnp.asarray, (q, k, v, positions, until))))
    index = np.arange(time)
    seen = (index[None] <= index[:, None]) & (index[:, None] < until[:, None])  # [B, query, key]
    weights = np.exp(np.einsum("bkgth,bksh->bkgts", q.astype(np.float64), k)) * seen[:, None, None]
    sees = seen.any(-1)
    assert not sees.all()
    mixed = np.einsum("bkgts,bksh->btkgh", weights, v)
    total = np.maximum(weights.sum(-1), 1e-9).transpose(0, 3, 1, 2)[..., None]
    mixed = mixed / total
    np.testing.assert_allclose(found[sees], mixed.reshape(2, time, -1)[sees], rtol=1e-4, atol=1e-5)
    assert np.isfinite(found).all()


def test_long_rows_have_few_blocks() -> None:
    assert [query_block(t) for t in (1, 2048, 2049, 32768)] == [128, 128, 256, 2048]


def test_a_packed_tree_equals_its_sequences_apart() -> None:
    """Value and gradient: prompt once with two branches against two rows that repeat it."""
    config, params = make("qwen3")
    draw = np.random.default_rng(3)
    prompt, first, second = (draw.integers(0, 37, n).astype(np.int32) for n in (5, 3, 6))
    weight = draw.standard_normal((14, config.hidden_size)).astype(np.float32)

    def pad(x: np.ndarray, size: int) -> np.ndarray:
        return np.pad(x, (0, size - len(x)))

    packed = (
        np.concatenate([prompt, first, second])[None],
        np.array([[*range(5), 5, 6, 7, *range(5, 11)]], np.int32),
        np.array([[14] * 5 + [8] * 3 + [14] * 6], np.int32),
    )
    apart = (
        np.stack([pad(np.r_[prompt, first], 11), pad(np.r_[prompt, second], 11)]),
        np.tile(np.arange(11, dtype=np.int32), (2, 1)),
        np.stack([pad(np.full(8, 11, np.int32), 11), np.full(11, 11, np.int32)]),
    )

    def loss_packed(p: Any) -> jax.Array:
        return (hidden(config, p, *packed)[0, 5:] * weight[5:]).sum()

    def loss_apart(p: Any) -> jax.Array:
        h = hidden(config, p, *apart)
        return (h[0, 5:8] * weight[5:8]).sum() + (h[1, 5:11] * weight[8:]).sum()

    one, two = (jax.jit(jax.value_and_grad(f))(params) for f in (loss_packed, loss_apart))
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5)
    for path, leaf in jax.tree.leaves_with_path(one[1]):
        other = two[1]
        for entry in path:
            other = other[entry.key]
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-4 * float(jnp.abs(other).max() + 1e-6))


def test_rows_that_see_nothing_have_a_finite_gradient() -> None:
    config, params = make("llama")
    zeros = np.zeros((2, 6), np.int32)
    value, gradient = jax.value_and_grad(lambda p: hidden(config, p, zeros, zeros, zeros).sum())(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_recomputation_changes_no_gradient() -> None:
    gradients = []
    for remat in ("none", "dots", "full", "auto"):
        config, params = make("qwen2 with windows", remat=remat)
        tokens = np.arange(12, dtype=np.int32)[None]
        until = np.full((1, 12), 12, np.int32)
        gradients.append(
            jax.jit(jax.grad(lambda p, c=config, t=tokens, u=until: jnp.square(hidden(c, p, t, t, u)).sum()))(
                params
            )
        )
    for other in gradients[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), gradients[0], other)


def test_the_reward_head_and_the_initial_values() -> None:
    config = parse(CONFIGS["llama"] | {"initializer_range": 0.05}, "score")
    params = decoder.init(config, jax.random.key(0))
    assert "lm_head" not in params
    assert params["score"]["kernel"].shape == (24, 1)
    states = np.random.default_rng(0).standard_normal((3, 2, 24)).astype(np.float32)
    found = decoder.score(config, params, jnp.asarray(states, jnp.bfloat16))
    assert found.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(states, jnp.bfloat16), np.float64)
    np.testing.assert_allclose(
        found, rounded @ np.asarray(params["score"]["kernel"], np.float64)[:, 0], rtol=1e-4, atol=1e-6
    )
    gate = np.asarray(params["layers"]["mlp"]["gate_proj"]["kernel"])
    assert abs(gate.std() - 0.05) < 0.002
    assert abs(gate[0] - gate[1]).max() > 0.05  # layers differ
    assert (np.asarray(params["norm"]["weight"]) == 1).all()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_bfloat16_computes_in_bfloat16_with_float32_parameters() -> None:
    config, params = make("qwen3", dtype="bfloat16")
    tokens = np.arange(9, dtype=np.int32)[None]
    until = np.full((1, 9), 9, np.int32)
    half = hidden(config, params, tokens, tokens, until)
    whole = hidden(dataclasses.replace(config, dtype="float32"), params, tokens, tokens, until)
    assert half.dtype == jnp.bfloat16
    assert whole.dtype == jnp.float32
    difference = np.abs(np.asarray(half, np.float32) - np.asarray(whole))
    assert 0 < difference.max() < 0.2
    gradient = jax.grad(lambda p: hidden(config, p, tokens, tokens, until).sum().astype(jnp.float32))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
