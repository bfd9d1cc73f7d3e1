"""Samplers of tests: their inputs from one list of settings, and what two rollouts must share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlhf_core import Rollouts, SamplerInputs
from rlhf_core.mesh import make_mesh
from rlhf_core.sampling import SamplingMesh, SamplingOptions
from tests.shared import sampled
from tests.shared.sampled import SIZES as SIZES
from tests.shared.sampled import VOCAB as VOCAB

FAMILIES: dict[str, dict[str, Any]] = {
    **sampled.FAMILIES,
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
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Of the two that differ, two devices can share heads, and four the experts."""


def inputs(
    definition: Any, mesh: Any = None, *, stop_ids: Any = (3,), tensor: int | None = None, **settings: Any
) -> SamplerInputs:
    """Make a sampler's inputs. mesh: one device by default. settings: fields of SamplingOptions and SamplerInputs."""
    own = {name: settings.pop(name) for name in SamplingOptions.model_fields if name in settings}
    options = settings.pop("options", None) or SamplingOptions(mesh=SamplingMesh(tensor=tensor), **own)
    if mesh is None:
        mesh = make_mesh(devices=jax.devices()[:1])
    return SamplerInputs(definition=definition, options=options, mesh=mesh, stop_ids=stop_ids, **settings)


def assert_same(found: Rollouts, expected: Rollouts, atol: float = 2e-5) -> None:
    for name in ("tokens", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logps, expected.logps, atol=atol)
