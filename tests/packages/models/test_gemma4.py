"""What is Gemma 4's alone: its files, its fields, and what of it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rlhf_core.models import DECODER, paths
from rlhf_core.state import fixed_parameters
from tests.shared.decoder_configs import CONFIGS

DENSE, EXPERTS = (CONFIGS[f"gemma4, {name}"] for name in ("shared keys", "experts"))


def test_names_of_experts_and_routers(tiny: Any, tmp_path: Path) -> None:
    model = tiny.drawn(EXPERTS)
    model.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {
        name.removeprefix("model.layers.3."): x.shape
        for name, x in tensors.items()
        if ".3." in name and ("router" in name or "experts" in name)
    }
    hidden, count, size = EXPERTS["hidden_size"], EXPERTS["num_experts"], EXPERTS["moe_intermediate_size"]
    assert shapes == {
        "experts.gate_up_proj": (count, 2 * size, hidden),
        "experts.down_proj": (count, hidden, size),
        "router.proj.weight": (count, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (count,),
    }
    moe = model.params["layers"]["full_attention"]["moe"]["experts"]
    both = tensors["model.layers.1.experts.gate_up_proj"]
    np.testing.assert_array_equal(both[:, :size].swapaxes(1, 2), moe["gate_proj"]["kernel"][0])
    np.testing.assert_array_equal(both[:, size:].swapaxes(1, 2), moe["up_proj"]["kernel"][0])


def test_no_update_changes_the_scalars_of_layers() -> None:
    params = DECODER.define(DENSE, "lm").abstract_params()
    fixed = fixed_parameters(params, None)
    assert fixed == {path for path, _ in paths(params) if path[-1] == "layer_scalar"}
    assert len(fixed) == 4


def test_heads_of_single_layers_say_the_same_as_those_of_a_type() -> None:
    """As transformers 5 writes what `global_head_dim` says: numbers have as many digits as the largest."""
    kinds = DENSE["layer_types"]
    table = {f"{i:02}": {"head_dim": 16} for i, kind in enumerate(kinds) if kind == "full_attention"}
    written = {name: value for name, value in DENSE.items() if name != "global_head_dim"}
    assert DECODER.define(written | {"per_layer_config": table}, "lm") == DECODER.define(DENSE, "lm")
