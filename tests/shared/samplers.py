"""Samplers of tests: their inputs from one list of settings, small families, and what two rollouts must share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from rlhf_core import Rollouts, SamplerInputs
from rlhf_core.mesh import make_mesh
from rlhf_core.sampling import Sampler, SamplingMesh, SamplingOptions

VOCAB = 48
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},  # biases of projections, tied
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},  # norms of heads
    "phi3": {"model_type": "phi3"},  # fused projections
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
    },  # windows and soft caps
    "gemma4": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCAB,
        "rms_norm_eps": 0.01,
    },  # heads of two sizes, keys and values of other layers, inputs per layer
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},  # biases, sinks
    "qwen3_5": QWEN3_5,
    "lfm2": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": True,
    },
    # Next to layers with a state, only experts are shared.
    "qwen3_5_moe": QWEN3_5
    | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
    },
    "odd": {"model_type": "llama", "vocab_size": VOCAB + 1},  # a vocabulary that no device count divides
}


def inputs(
    definition: Any, mesh: Any = None, *, stop_ids: Any = (3,), tensor: int | None = None, **settings: Any
) -> SamplerInputs:
    """Make a sampler's inputs. mesh: one device by default. settings: fields of SamplingOptions and SamplerInputs."""
    own = {name: settings.pop(name) for name in SamplingOptions.model_fields if name in settings}
    options = settings.pop("options", None) or SamplingOptions(mesh=SamplingMesh(tensor=tensor), **own)
    if mesh is None:
        mesh = make_mesh(devices=jax.devices()[:1])
    return SamplerInputs(definition=definition, options=options, mesh=mesh, stop_ids=stop_ids, **settings)


def five_prompts() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, VOCAB, n).astype(np.int32) for n in (3, 12, 8, 20, 5)]


def sample(definition: Any, params: Any, mesh: Any, tensor: int | None = None, **options: Any) -> Rollouts:
    """Sample three completions of at most nine tokens for each of five prompts."""
    counts = {"num_generations": 3, "prompts_per_call": 5, "max_prompt_length": 24}
    given = {"max_completion_length": 9, **counts, **options}
    sampler = Sampler(inputs(definition, mesh, tensor=tensor, **given))
    placed = jax.device_put(params, definition.shardings(mesh))
    return sampler(placed, five_prompts(), jax.random.key(0))


@functools.cache
def _logits_of(definition: Any) -> Any:
    return jax.jit(definition.padded_logits)


def full_logits(definition: Any, params: Any, tokens: Any) -> np.ndarray:
    """float64 [time, vocabulary] of one sequence, by the forward pass that training uses."""
    width = -(-len(tokens) // 64) * 64  # one program for most lengths
    ids, mask = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
    ids[0, : len(tokens)] = tokens
    mask[0, : len(tokens)] = 1
    return np.asarray(_logits_of(definition)(params, ids, mask)[0, : len(tokens)], np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def full_logps(
    definition: Any, params: Any, prompt: np.ndarray, completion: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """float64 [time]: log-probabilities of a completion's tokens by one pass over the whole sequence."""
    logits = full_logits(definition, params, [*prompt, *completion])[len(prompt) - 1 : -1]
    return np.asarray(log_softmax(logits / temperature)[np.arange(len(completion)), completion])


def assert_same(found: Rollouts, expected: Rollouts, atol: float = 2e-5) -> None:
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logps, expected.logps, atol=atol)
