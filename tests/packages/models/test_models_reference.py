"""The decoder against one in float64 NumPy, decoder_reference.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models import DECODER, Decoder
from rlhf_core.models.attention import attend, query_block
from tests.shared import decoder_reference as reference

hidden = jax.jit(Decoder.hidden, static_argnums=0)
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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 3.0],
    "long_factor": [2.0, 5.0],
    "attention_factor": 1.2,
    "rope_theta": 100.0,
}
GEMMA = BASE | {
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 10,
    "sliding_window": 3,
}
GEMMA4 = BASE | {
    "model_type": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    },
    "vocab_size_per_layer_input": 40,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
}
QWEN3_5 = BASE | {
    "model_type": "qwen3_5_text",
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
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
    "mistral, yarn": BASE | {"model_type": "mistral", "sliding_window": 3, "rope_scaling": YARN},
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0},
    "gemma3": GEMMA
    | {
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 20.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4, shared keys": GEMMA4
    | {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "hidden_size_per_layer_input": 6,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
    },
    "gemma4, keys as values": GEMMA4
    | {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "attention_bias": True,
        "num_global_key_value_heads": 1,
    },
    "gemma4, experts": GEMMA4
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "phi3": BASE
    | {
        "model_type": "phi3",
        "head_dim": 8,
        "sliding_window": None,
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
        "original_max_position_embeddings": 16,
    },
    "olmo2": BASE | {"model_type": "olmo2", "attention_bias": True},
    "olmo3": BASE
    | {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 3, "rope_scaling": YARN},
    "granite": BASE
    | {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "ministral3": BASE
    | {
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "original_max_position_embeddings": 3,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "glm4_moe": BASE
    | {
        "model_type": "glm4_moe",
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 12,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "head_dim": 8,
    },
    "gpt_oss": BASE
    | {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "sliding_window": 3,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 0.5,
    },
    "lfm2_moe": BASE
    | {
        "model_type": "lfm2_moe",
        "norm_eps": 1e-5,
        "conv_bias": True,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5
    | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    },
    "smollm3": BASE
    | {
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 3,
    },
    "smollm3, deep": BASE | {"model_type": "smollm3", "no_rope_layer_interval": 4, "num_hidden_layers": 9},
    "mixtral": BASE
    | {"model_type": "mixtral", "sliding_window": 4, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": BASE
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": False,
    },
}


def make(name: str, **changes: Any) -> tuple[Decoder, dict[str, Any]]:
    """A model and parameters in which nothing is 0 or 1, so that no term can be left out unnoticed.

    Norms and biases have a mean other than 0, matrices have not: deep layers would see one direction only.
    """
    model = DECODER.define(CONFIGS[name], "lm").computing(**changes)
    draw = np.random.default_rng(0)

    def value(path: Any, leaf: Any) -> jax.Array:
        mean = 0.0 if path[-1].key in ("kernel", "embedding") else 0.2
        return jnp.asarray(mean + 0.3 * draw.standard_normal(leaf.shape), jnp.float32)

    return model, jax.tree.map_with_path(value, model.abstract_params())


SECOND = ("llama", "linear rope", "qwen2")
"""Of which other configs have every term: gemma3 a linear rope, "qwen2 with windows" the biases."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SECOND else name for name in CONFIGS]
)
def test_hidden_and_head_equal_the_reference(name: str) -> None:
    model, params = make(name)
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, model.vocab_size, (2, 14)).astype(np.int32)
    # Row 0: unused, then a tree of a prompt of 4 and branches of 3 and 4. Row 1: two sequences, then unused.
    until = np.array([[0] + [12] * 4 + [8] * 3 + [12] * 4 + [0] * 2, [5] * 5 + [12] * 7 + [0] * 2], np.int32)
    positions = np.array([[0, 0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 0, 0], [*range(5), *range(7), 0, 0]], np.int32)
    used = until > 0
    found = np.asarray(hidden(model, params, tokens, positions, until))
    assert np.isfinite(found).all()
    for row in range(2):
        seen = reference.visible(until[row])
        expected = reference.hidden(CONFIGS[name], params, tokens[row], positions[row], seen)
        bound = 2e-4 if "qwen3_5" in name else 2e-5  # short keys are normalised
        np.testing.assert_allclose(found[row][used[row]], expected[used[row]], rtol=2e-4, atol=bound)
    kernel, cap = model.unembedding(params)
    assert cap == CONFIGS[name].get("final_logit_softcapping")
    source = params["embed_tokens"]["embedding"].T if model.config.tied else params["lm_head"]["kernel"]
    np.testing.assert_array_equal(kernel, source / CONFIGS[name].get("logits_scaling", 1.0))


@pytest.mark.parametrize(
    "time", [pytest.param(128, marks=pytest.mark.long), 129, pytest.param(300, marks=pytest.mark.long)]
)
def test_query_blocks_change_nothing(time: int) -> None:
    draw = np.random.default_rng(2)
    q = draw.standard_normal((2, 2, 2, time, 4)).astype(np.float32)
    k, v = (draw.standard_normal((2, 2, time, 4)).astype(np.float32) for _ in range(2))
    until = draw.integers(0, time + 1, (2, time)).astype(np.int32)
    positions = np.tile(np.arange(time, dtype=np.int32), (2, 1))
    found = np.asarray(jax.jit(attend)(q, k, v, positions, until))
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma3", marks=pytest.mark.long),
        "smollm3",
        "gemma4, shared keys",
        pytest.param("gemma4, keys as values", marks=pytest.mark.long),
        pytest.param("gemma4, experts", marks=pytest.mark.long),
        pytest.param("mixtral", marks=pytest.mark.long),
    ],
)
def test_a_packed_tree_equals_its_sequences_apart(name: str) -> None:
    """Value and gradient: prompt once with two branches against two rows that repeat it.

    The second branch is further from the prompt by index than a window is wide, by position it is not. The tree is
    computed in loops over layers, which the backward pass computes again.
    """
    model, params = make(name)
    looped = model.computing(remat="full")
    draw = np.random.default_rng(3)
    prompt, first, second = (draw.integers(0, 37, n).astype(np.int32) for n in (5, 3, 6))
    weight = draw.standard_normal((14, model.hidden_size)).astype(np.float32)

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
        return (hidden(looped, p, *packed)[0, 5:] * weight[5:]).sum()

    def loss_apart(p: Any) -> jax.Array:
        h = hidden(model, p, *apart)
        return (h[0, 5:8] * weight[5:8]).sum() + (h[1, 5:11] * weight[8:]).sum()

    one, two = (jax.jit(jax.value_and_grad(f))(params) for f in (loss_packed, loss_apart))
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5, atol=1e-5)  # a sum in which much cancels
    for path, leaf in jax.tree.leaves_with_path(one[1]):
        other = two[1]
        for entry in path:
            other = other[entry.key]
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-4 * (np.abs(other).max() + 1e-6))


def test_rows_that_see_nothing_have_a_finite_gradient() -> None:
    model, params = make("llama")
    zeros = np.zeros((2, 6), np.int32)
    loss = jax.jit(jax.value_and_grad(lambda p: model.hidden(p, zeros, zeros, zeros).sum()))
    value, gradient = loss(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.long  # test_models_compute.py tries it too, with the memory that it saves
def test_recomputation_changes_no_gradient() -> None:
    gradients = []
    for remat in ("none", "full", "auto"):
        model, params = make("qwen2 with windows", remat=remat)
        tokens = np.arange(12, dtype=np.int32)[None]
        until = np.full((1, 12), 12, np.int32)
        gradients.append(
            jax.jit(jax.grad(lambda p, c=model, t=tokens, u=until: jnp.square(hidden(c, p, t, t, u)).sum()))(
                params
            )
        )
    for other in gradients[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), gradients[0], other)


def test_the_reward_head_and_the_initial_values() -> None:
    model = DECODER.define(CONFIGS["llama"] | {"initializer_range": 0.05}, "score")
    params = jax.jit(model.init)(jax.random.key(0))
    assert "lm_head" not in params
    assert params["score"]["kernel"].shape == (24, 1)
    states = np.random.default_rng(0).standard_normal((3, 2, 24)).astype(np.float32)
    found = model.score(params, jnp.asarray(states, jnp.bfloat16))
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
    model, params = make("qwen3", dtype="bfloat16")
    tokens = np.arange(9, dtype=np.int32)[None]
    until = np.full((1, 9), 9, np.int32)

    def loss(p: Any) -> tuple[jax.Array, jax.Array]:
        states = model.hidden(p, tokens, tokens, until)
        return states.sum().astype(jnp.float32), states

    gradient, half = jax.jit(jax.grad(loss, has_aux=True))(params)
    whole = hidden(model.computing(dtype="float32"), params, tokens, tokens, until)
    assert half.dtype == jnp.bfloat16
    assert whole.dtype == jnp.float32
    difference = np.abs(np.asarray(half, np.float32) - np.asarray(whole))
    assert 0 < difference.max() < 0.2
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
