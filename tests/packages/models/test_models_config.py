"""What config.json says, in the spelling of transformers 4 and 5; what it may not say is named, with its value."""

from __future__ import annotations

import math
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from rlhf_core.errors import InputError
from rlhf_core.models import (
    DECODER,
    Architecture,
    Layer,
    decoder_family,
    find_family,
    fresh_model,
    load_model,
    paths,
)
from rlhf_core.state import fixed_parameters
from tests.shared.decoder_configs import CONFIGS, defined
from tests.shared.mesh_cases import FAMILIES

LLAMA = FAMILIES["llama"]


def parse(fields: dict[str, Any]) -> Any:
    model: Any = defined(fields, "lm")
    return model.config


def of(model_type: str, **changes: Any) -> dict[str, Any]:
    return LLAMA | {"model_type": model_type} | changes


def test_rope_in_the_keys_of_transformers_4_and_5() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = ("llama3", 5e5, 8.0, 1.0, 4.0, 64)
    for kind in ("rope_type", "type"):
        old = {"rope_theta": 500000, "rope_scaling": {kind: "llama3", **llama3}}
        assert astuple(parse(LLAMA | old).ropes[0])[:6] == expected
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **llama3}}
    assert astuple(parse(LLAMA | new).ropes[0])[:6] == expected
    del llama3["original_max_position_embeddings"]
    whole = {"rope_scaling": {"type": "llama3", **llama3}, "max_position_embeddings": 64, "rope_theta": 5e5}
    assert astuple(parse(LLAMA | whole).ropes[0])[:6] == expected
    assert parse(LLAMA | {"rope_scaling": None}).ropes[0].theta == 10_000
    assert parse(of("smollm3")).ropes[0].theta == 2_000_000
    assert parse(of("mixtral")).ropes[0].theta == 1_000_000
    assert parse(of("glm4_moe")).ropes[0].share == 0.5


def test_gemma3_has_a_rope_for_each_kind_of_layer() -> None:
    """Where its configuration does not say which layers slide; the spellings: test_models_golden.py."""
    plain = parse(of("gemma3_text", num_hidden_layers=7))
    assert plain.layer_ropes == (0, 0, 0, 0, 0, 1, 0)
    assert [rope.theta for rope in plain.ropes] == [1e4, 1e6]


def test_layers_without_rope() -> None:
    config = parse(of("smollm3", num_hidden_layers=5))
    assert config.layer_ropes == (0, 0, 0, 1, 0)
    assert config.ropes[1].kind == "none"
    listed = parse(of("smollm3", num_hidden_layers=3, no_rope_layers=[0, 1, 1, 1]))
    assert [listed.ropes[i].kind for i in listed.layer_ropes] == ["none", "default", "default"]


def test_the_magnitude_of_yarn_and_longrope() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse(LLAMA | {"rope_scaling": yarn}).ropes[0].magnitude == 0.1 * math.log(4) + 1
    slopes = yarn | {"mscale": 0.7, "mscale_all_dim": 0.5}
    expected = (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert parse(LLAMA | {"rope_scaling": slopes}).ropes[0].magnitude == pytest.approx(expected)
    named = yarn | {"attention_factor": 1.5, "beta_fast": 16, "truncate": False}
    rope = parse(LLAMA | {"rope_scaling": named}).ropes[0]
    assert (rope.magnitude, rope.beta_fast, rope.beta_slow, rope.truncate) == (1.5, 16.0, 1.0, False)
    for name in ("longrope", "su"):
        long = {"type": name, "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
        rope = parse(
            of("phi3", rope_scaling=long, max_position_embeddings=64, original_max_position_embeddings=16)
        ).ropes[0]
        assert (rope.kind, rope.divisors, rope.original_length) == ("longrope", (1.0, 2.0), 16)
        assert rope.magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


def test_longrope_refuses_rows_that_it_would_turn_otherwise() -> None:
    long = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    model = defined(of("phi3", rope_scaling=long, original_max_position_embeddings=8), "lm")
    params, rows = model.abstract_params(), jax.ShapeDtypeStruct((1, 9), np.int32)
    assert jax.eval_shape(model.hidden, params, *[jax.ShapeDtypeStruct((1, 8), np.int32)] * 3)
    with pytest.raises(InputError, match=r"rows of 9 tokens .* original_max_position_embeddings .* 8"):
        jax.eval_shape(model.hidden, params, rows, rows, rows)
    with pytest.raises(InputError, match="rows of 12 tokens"):
        jax.eval_shape(lambda p, x: model.ring(model.prefill(p, *[x[:, :4]] * 3)[1], 12, 0), params, rows)


@pytest.mark.parametrize("model_type", DECODER.name)
def test_fields_that_change_nothing_are_allowed(model_type: str) -> None:
    """Those that transformers writes into every file, and empty ones of other families."""
    extra = {
        "architectures": ["X"],
        "_name_or_path": "x",
        "transformers_version": "4.40.0",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "eos_token_id": [2, 3],
        "attention_dropout": 0.1,
        "max_window_layers": 28,
        "full_attn_mod": 1,
        "clip_qkv": None,
        "use_bidirectional_attention": False,
        "id2label": {"0": "LABEL_0"},
    }
    assert parse(of(model_type, **extra)) == parse(of(model_type))


def test_windows_are_read_only_where_the_config_switches_them_on() -> None:
    qwen = of("qwen2", sliding_window=8, max_window_layers=1)
    assert parse(qwen).windows == (None, None)
    assert parse(qwen | {"use_sliding_window": True}).windows == (None, 8)
    kinds = ["sliding_attention", "full_attention"]
    assert parse(qwen | {"use_sliding_window": True, "layer_types": kinds}).windows == (8, None)
    assert parse(of("mistral")).windows == (4096, 4096)
    assert parse(of("mistral", sliding_window=None)).windows == (None, None)
    assert parse(of("qwen3_moe", sliding_window=8)).windows == (None, None)
    assert parse(of("qwen3_moe", sliding_window=8, use_sliding_window=True)).windows == (8, 8)
    assert parse(of("gemma2", num_hidden_layers=3)).windows == (4096, None, 4096)
    window = {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2}
    assert parse(of("smollm3", **window)).windows == (None, 8)


def test_a_null_is_not_a_missing_field() -> None:
    assert parse(of("gemma2")).attention_softcap == 50
    assert parse(of("gemma2", attn_logit_softcapping=None)).attention_softcap is None
    missing = {
        name: value for name, value in of("mistral", num_attention_heads=8).items() if "key" not in name
    }
    assert parse(missing).num_kv_heads == 8
    assert parse(of("mistral", num_key_value_heads=None)).num_kv_heads == 4
    assert parse(of("gemma2")).tied
    assert not parse(of("llama")).tied


def test_a_stranger_registers_a_family(tmp_path: Path) -> None:
    """A family is data: its fields' defaults, its switches, and its names of weights."""
    own = Architecture(
        "NewForCausalLM",
        {"tie_word_embeddings": True, "sliding_window": 7},
        qk_norm="head",
        norms="after",
        layer_types=lambda values, layers: ["sliding_attention"] * layers,
        weight_names={"layers.mlp.up_proj": "trunk.{layer}.up", "embed_tokens": "words"},
    )
    family = decoder_family({"new": own})
    registry: Any = SimpleNamespace(get=lambda kind, name: family, names=lambda kind: ["new"])
    assert find_family("new", registry) is family
    config = family.define(of("new"), "lm").config  # type: ignore[attr-defined]
    assert (config.windows, config.norms, config.tied) == ((7, 7), "after", True)
    made = fresh_model(of("new"), registry=registry)
    made.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {"words.weight", "trunk.1.up.weight", "model.layers.1.mlp.gate_proj.weight"} < set(tensors)
    again = load_model(tmp_path, registry=registry)
    jax.tree.map(np.testing.assert_array_equal, again.params, made.params)
    with pytest.raises(InputError, match="'llama' is not supported; the decoder reads new"):
        family.define(LLAMA, "lm")


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
    params = defined(DENSE, "lm").abstract_params()
    fixed = fixed_parameters(params, None)
    assert fixed == {path for path, _ in paths(params) if path[-1] == "layer_scalar"}
    assert len(fixed) == 4


def test_heads_of_single_layers_say_the_same_as_those_of_a_type() -> None:
    """As transformers 5 writes what `global_head_dim` says: numbers have as many digits as the largest."""
    kinds = DENSE["layer_types"]
    table = {f"{i:02}": {"head_dim": 16} for i, kind in enumerate(kinds) if kind == "full_attention"}
    written = {name: value for name, value in DENSE.items() if name != "global_head_dim"}
    assert defined(written | {"per_layer_config": table}, "lm") == defined(DENSE, "lm")


class WithoutAxes(Layer):
    """A layer whose author forgot where a parameter lies on devices."""

    def __init__(self, config: Any, rngs: Any) -> None:
        super().__init__(config, rngs)
        self.factor = nnx.Param(jnp.ones((config.num_layers,)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"layers": {"mine": WithoutAxes}, "layer_types": lambda read, layers: ["mine"] * layers},
            r"'layers\.mine\.factor' of strange has 1 dimensions and axes \(\); make it nnx\.Param",
        ),
        (
            {"layers": {"mine": Layer}, "layer_types": lambda read, layers: ["yours"] * layers},
            "layer_types: 'yours' is none of full_attention, mine, the layers of strange",
        ),
    ],
    ids=["axes", "layer_types"],
)
def test_an_author_is_told_what_a_layer_lacks(changes: dict[str, Any], problem: str) -> None:
    family = decoder_family({"strange": Architecture("StrangeForCausalLM", **changes)})
    with pytest.raises(InputError, match=problem):
        family.define(of("llama") | {"model_type": "strange"}, "lm").abstract_params()
