"""Models, their files, adapters and meshes that do not do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rlhf_core import load_model, plugins
from rlhf_core.contracts import ATTENTION
from rlhf_core.mesh import planned_mesh
from rlhf_core.models import Definition, fresh_model
from tests.mistakes.mistake import Mistake, call, file, setting
from tests.shared.decoder_configs import CONFIGS, defined

LLAMA = {name: value for name, value in CONFIGS["llama"].items() if not name.startswith("r")}
WEIGHTS, INDEX = "model/model.safetensors", "model/model.safetensors.index.json"
TABLE = 'model_type = "llama", num_attention_heads = 2, intermediate_size = 24'
NORM = "model.layers.0.self_attn.q_proj.lora_A.weight"
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
MODERN = {"rope_type": "default"}


def config(changes: Mapping[str, Any], of: str = "llama") -> Mistake:
    """Fields of a family's config.json, as it is read without a tokenizer, which transformers reads it for, too."""
    fields = LLAMA | CONFIGS.get(of, {"model_type": of}) | changes
    name = f"config.json of {of}: {json.dumps(changes)[1:-1]}"
    return call(name, lambda place: defined(fields, "lm"))


def adapter(changes: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None) -> Mistake:
    """Fields of an adapter_config.json, or tensors of another shape."""

    def make(place: Any) -> None:
        directory = place.path / "adapter"
        load_model("model").with_lora(rank=2, targets="q_proj").save(directory)
        found = json.loads((directory / "adapter_config.json").read_text())
        place.write("adapter/adapter_config.json", json.dumps(found | changes))
        given = {
            f"base_model.model.{name}": np.zeros(shape, np.float32) for name, shape in (tensors or {}).items()
        }
        save_file(
            load_file(directory / "adapter_model.safetensors") | given,
            directory / "adapter_model.safetensors",
        )

    name = (
        f"adapter_config.json: {json.dumps(changes)[1:-1]}"
        if changes
        else f"a tensor of an adapter: {tensors}"
    )
    command = "check base.toml --set base.model=adapter" if changes else lambda place: load_model("adapter")
    return Mistake(name, make, command)


def stored(name: str, change: Callable[[dict[str, Any]], object]) -> Mistake:
    """Other tensors in the model's file."""

    def make(place: Any) -> None:
        tensors = load_file(WEIGHTS)
        change(tensors)
        save_file(tensors, WEIGHTS)

    return Mistake(name, make)


def index(name: str, content: str | bytes) -> Mistake:
    """An index of shards, which are not there."""

    def make(place: Any) -> None:
        place.write(INDEX, content)
        (place.path / WEIGHTS).unlink()

    return Mistake(name, make)


def wrong_file(place: Any) -> None:
    names = [*load_file(WEIGHTS), "model.extra.weight"]
    (place.path / WEIGHTS).rename(place.path / "model/model-1.safetensors")
    place.write(INDEX, json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))


def removed(name: str) -> Callable[[Any], object]:
    return lambda place: (place.path / name).unlink()


def misfit(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.extra.weight"] = tensors["model.norm.weight"] = np.zeros(17, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(
        2, np.float32
    )  # harmless, of older files


def above_the_model(place: Any) -> None:
    directory = place.path / "run/rm/artifacts/model"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")


def alone_with_an_adapter(place: Any) -> None:
    (place.path / "model/config.json").rename(place.path / "model/adapter_config.json")
    place.write("model/adapter_config.json", "{}")


def open_model(place: Any) -> None:
    load_model("model")


def attention(name: str, **more: Any) -> Callable[[Any], object]:
    time, zeros = 9, np.zeros
    arrays = (zeros((1, 1, 1, time, 20), np.float32), *(zeros((1, 1, time, 20), np.float32) for _ in "kv"))
    rows = zeros((1, time), np.int32), zeros((1, time), np.int32)
    return lambda place: plugins.load().registry.get(ATTENTION, name)(*arrays, *rows, **more)


class Own(Definition):
    """A family without options."""


FIELDS = [
    config({"model_type": "lama"}),
    config({"model_type": ["llama"]}),
    config({"hidden_size": None}),
    config({"num_hidden_layers": "2"}),
    config({"num_key_value_heads": 3}),
    config({"hidden_size": 18, "num_attention_heads": 4}),
    config({"hidden_size": 2.5, "num_attention_heads": True, "vocab_size": [2]}),
    config({"head_dim": 5}),
    config({"hidden_act": "relu6"}),
    config({"hidden_act": ["silu"]}),
    config({"query_pre_attn_scalar": 0}, of="gemma2"),
    config({"rms_norm_eps": "tiny"}),
    config({"attention_bias": "yes"}),
    config({"use_bidirectional_attention": True}),
    config({"is_causal": False}),
    config({"is_causal": False, "attention_bias": 3}),
    config({"sliding_window": 8}),
    config({"hiden_act": "gelu"}),
    config({"hidden_size": 0, "hidden_act": "x", "intermediate_size": 1.5}),
    config({"layer_types": ["sliding_attention"] * 3}),
    config({"layer_types": ["chunked_attention"] * 3}),
    config({"layer_types": ["full_attention"]}),
    config({"no_rope_layers": [1]}, of="smollm3"),
    config({"attn_logit_softcapping": 50.0}, of="gemma3_text"),
    config({"hidden_act": "relu"}, of="gemma2"),
    config({"sliding_window": None}, of="gemma2"),
    config({"final_logit_softcapping": -1.0}, of="gemma2"),
    config({"layer_types": ["full_attention"] * 3}, of="mistral"),
    config({"layer_types": ["sliding_attention"] * 3}, of="qwen2"),
    config({"mlp_only_layers": [0]}, of="qwen3_moe"),
    config({"decoder_sparse_step": 2}, of="qwen3_moe"),
    config({"num_experts": 4, "num_local_experts": 5}, of="qwen3_moe"),
    config({"num_local_experts": 1}, of="mixtral"),
    config({"per_layer_config": {"1": {"head_dim": 16}}}, of="gemma4, shared keys"),
    config({"per_layer_config": {"1": {"window": 2}}}, of="gemma4, shared keys"),
    config({"per_layer_config": {"0": {"head_dim": 0}}}, of="gemma4, shared keys"),
    config({"num_kv_shared_layers": 7}, of="gemma4, shared keys"),
    config({"layer_types": ["full_attention", "sliding_attention"] * 4}, of="gemma4, shared keys"),
    config({"layer_types": [["full_attention"]] * 8}, of="gemma4, shared keys"),
    config({"use_bidirectional_attention": "all"}, of="gemma4, shared keys"),
    config({"vocab_size_per_layer_input": 20}, of="gemma4, shared keys"),
    config({"global_head_dim": 15}, of="gemma4, shared keys"),
    config({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, of="gemma4, shared keys"),
]
ROPES = [
    config({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    config({"rope_scaling": {"rope_type": "longrope"}}),
    config({"rope_scaling": {"type": "linear"}}),
    config({"rope_scaling": {"type": "linear", "factor": "2"}}),
    config({"rope_scaling": {"type": "linear", "factor": -2}}),
    config({"rope_scaling": {"type": "default", "factor": 2.0}}),
    config({"rope_scaling": {"mrope_section": [1, 2]}}),
    config({"rope_parameters": {"partial_rotary_factor": 0.5}}),
    config({"partial_rotary_factor": 0.5}),
    config({"rope_scaling": 3}),
    config({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": MODERN}),
    config({"rope_parameters": {"rope_theta": 5}}, of="gemma3_text"),
    config({"rope_parameters": LONG_ROPE}, of="phi3"),
]
MODELS = [
    setting('model = "modle"'),
    setting('model = "words"'),
    Mistake("model = a directory above a model's", above_the_model, "check rm.toml --set rm.model=run"),
    file("config.json is cut", "model/config.json", "{"),
    call(
        "load_model, config.json is a list", open_model, lambda place: place.write("model/config.json", "[]")
    ),
    call(
        "load_model, config.json is no text", open_model, lambda place: place.write("model/config.json", "\0")
    ),
    call("load_model, adapter_config.json is empty", open_model, alone_with_an_adapter),
    setting(
        f'model = {{ {TABLE}, hidden_size = 16, num_hidden_layers = 1, tokenizer = "words/", vocab_size = 20 }}'
    ),
    setting(f'model = {{ {TABLE}, hiden_size = 16, num_hidden_layers = 1, tokenizer = "words/" }}'),
    setting(f"model = {{ {TABLE}, hidden_size = 16, num_hidden_layers = 1 }}"),
    call("fresh_model without a vocab_size", lambda place: fresh_model(LLAMA | {"vocab_size": None})),
    call("fresh_model with 2³¹ layers", lambda place: fresh_model(LLAMA | {"num_hidden_layers": 2**31})),
    call(
        "fresh_model with 2³⁰ tokens",
        lambda place: fresh_model(LLAMA | {"hidden_size": 2048, "vocab_size": 2**30}),
    ),
    setting('model = "scorer"', command="check base.toml"),
    call(
        "load_model('model', head='score'), a language model", lambda place: load_model("model", head="score")
    ),
    call("load_model('scorer')", lambda place: load_model("scorer")),
    call("load_model('model').scores(…)", lambda place: load_model("model").scores([[3]], [[1]])),
    call(
        "load_model('scorer', 'score').logits(…)",
        lambda place: load_model("scorer", "score").logits([[3]], [[1]]),
    ),
    call(
        "fresh_model({…, pad_token_id: 2, eos_token_id: 2}, 'score')",
        lambda place: fresh_model(CONFIGS["llama"] | {"pad_token_id": 2, "eos_token_id": 2}, "score"),
    ),
    call(
        "computing(dtype='bfloat16') of a family without it", lambda place: Own().computing(dtype="bfloat16")
    ),
    call("computing(…) with remat too", lambda place: Own().computing(dtype="bfloat16", remat="full")),
]
FILES = [
    Mistake("no model.safetensors", removed(WEIGHTS)),
    Mistake(
        "pytorch_model.bin alone",
        lambda place: (place.path / WEIGHTS).rename(place.path / "model/pytorch_model.bin"),
    ),
    stored("tensors that do not fit config.json", misfit),
    index(
        "an index that names no file",
        json.dumps({"weight_map": {"model.norm.weight": "model-2.safetensors"}}),
    ),
    Mistake("an index that names a tensor of another file", wrong_file),
    index("an index that names a long file", json.dumps({"weight_map": {"lm_head.weight": "x" * 300}})),
    index("an index with a long name", json.dumps({"weight_map": {"a" * 100_000: 1}}).encode() + b"\xff"),
    index("an index that is nested", b'{"weight_map": ' + b"[" * 100_000),
    index("an index that is cut", "{"),
    index("an index that is a list", "[]"),
    index("an index that is empty", "{}"),
    index("an index whose map is a number", '{"weight_map": 3}'),
    config({"quantization_config": {"bits": 4}}),
    config({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    config({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}),
]
ADAPTERS = [
    setting('lora = { targets = ["q_porj"] }', command="check base.toml"),
    call(
        r"with_lora(targets=r'q_proj|layers\.7\.k_proj')",
        lambda place: load_model("model").with_lora(targets=r"q_proj|layers\.7\.k_proj"),
    ),
    setting("lora = { targets = 'layers\\.7\\..*' }", command="check base.toml"),
    call("with_lora() twice", lambda place: load_model("model").with_lora().with_lora()),
    adapter({"peft_type": "IA3"}),
    adapter({"bias": "all"}),
    adapter({"use_qalora": True}),
    adapter({"init_lora_weights": "pissa"}),
    adapter({"modules_to_save": ["lm_head"]}),
    adapter({"base_model_name_or_path": None}),
    adapter({"use_dora": True}),
    adapter({"r": 0, "lora_alpha": "x", "lora_dropout": 1.5, "use_rslora": "x", "alpha_pattern": {"(": 1}}),
    adapter({"modules_to_save": "x"}),
    adapter({}, {NORM: ()}),
    adapter({}, {NORM: (3,)}),
    adapter({}, {NORM: (3, 5)}),
]
DEVICES = [
    *(
        call(f"{sizes} of 8 devices", lambda place, sizes=sizes: planned_mesh(8, **sizes))
        for sizes in (
            {"tensor": 3},
            {"tensor": 16},
            {"fsdp": 4, "tensor": 4},
            {"data": 5, "fsdp": -1},
            {"data": 2},
        )
    ),
    call("attention 'pallas' on a CPU", attention("pallas")),
    call("attention 'cudnn' of 9 tokens with a soft cap", attention("cudnn", softcap=30.0)),
    setting('frozen_parameters = "embd"'),
    setting('frozen_parameters = ".*"'),
    setting("frozen_parameters = 'layers\\.3\\.'"),
    setting("frozen_parameters = ['embed|score', 'layers|norm']"),
]
SECTIONS = {
    "Fields of config.json": FIELDS,
    "Rotary embeddings of config.json": ROPES,
    "Models that cannot be opened": MODELS,
    "Files of weights": FILES,
    "Adapters": ADAPTERS,
    "Meshes, attention and what is frozen": DEVICES,
}
