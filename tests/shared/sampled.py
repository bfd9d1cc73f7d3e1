"""What samplers are tried on: models of few layers, whose eight heads four devices can share, and what they return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from rlhf_core.contracts import Rollouts, SamplerInputs
from rlhf_core.mesh import make_mesh
from rlhf_core.sampling import SamplingOptions
from tests.shared.decoder_configs import FAMILIES as FIELDS

VOCAB, SCALE = 48, 0.5
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "rms_norm_eps": 0.01,  # without it, norms of short vectors enlarge rounding
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "rms_norm_eps": 0.01,  # short outputs of the delta rule are normalised, which enlarges rounding
}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: FIELDS[name] | SIZES for name in ("llama", "qwen2", "qwen3", "mixtral", "gpt_oss")},
    "phi3": {"model_type": "phi3"} | SIZES,
    "gemma2": FIELDS["gemma2"] | SIZES | {"sliding_window": 8},
    "gemma4": FIELDS["gemma4, keys as values"] | SIZES | GEMMA4,
    "qwen3_5": FIELDS["qwen3_5"] | SIZES | LINEAR,
    "qwen3_5_moe": FIELDS["qwen3_5_moe"] | SIZES | LINEAR,
    "lfm2": FIELDS["lfm2"] | SIZES | {"layer_types": ["conv", "full_attention"], "conv_bias": True},
    "odd": {"model_type": "llama"} | SIZES | {"vocab_size": VOCAB + 1},
}
"""odd: a vocabulary that no number of devices divides."""


def inputs(definition: Any, options: SamplingOptions | dict[str, Any], **more: Any) -> SamplerInputs:
    """Describe a sampler, on one device where nothing else is given."""
    made = options if isinstance(options, SamplingOptions) else SamplingOptions(**options)
    given = {"stop_ids": (), "prompts_per_call": 4, "max_prompt_length": 40, **more}
    if given.get("mesh") is None:
        given["mesh"] = make_mesh(devices=jax.devices()[:1])
    return SamplerInputs(definition=definition, options=made, **given)


def assert_same(found: Rollouts, expected: Rollouts) -> None:
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logps, expected.logps, atol=1e-5)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Note the names of the programs that are compiled in between."""
    compiled: list[str] = []

    def note(event: str, seconds: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
