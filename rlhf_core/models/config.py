"""What a Hugging Face config.json says about a decoder, in one hashable value.

Fields are read in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
Whatever the decoder cannot honour is an error naming the field, never a silent guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core.errors import InputError, near

Head = Literal["lm", "score"]
Remat = Literal["auto", "none", "dots", "full"]


@dataclass(frozen=True)
class Architecture:
    """What a `model_type` implies that its config.json leaves unsaid.

    A bias is True, False, or the name of the config field that switches it.
    """

    causal_lm: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Used where config.json names none; None: hidden_size / num_attention_heads."""
    windowed: str | None = None
    """The config field that switches sliding windows on; None: the family has none."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", qkv_bias=True, windowed="use_sliding_window"),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        head_dim=128,
        windowed="use_sliding_window",
    ),
}

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

FIELDS = frozenset(
    [
        "model_type",
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "initializer_range",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "attention_bias",
        "mlp_bias",
        "attention_dropout",
        "tie_word_embeddings",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "use_cache",
        "pretraining_tp",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
    ]
)
"""The fields that a fresh model's table may give."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding.

    kind: "default", "linear" (positions divided by `factor`) or "llama3" (low frequencies divided by `factor`, high
        ones kept, blended in between, as in Llama 3.1).
    theta: base of the wavelengths. The factors are unitless; original_length is in positions.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one decoder. Hashable, so that it can be static under jit.

    windows: for every layer, how many positions back a query sees; None: all of them.
    remat: what the backward pass recomputes: "none", "dots" (all but matrix products with weights), "full" (all
        but each layer's input); "auto" is "none" while the activations are small, else "dots".
    dtype: of the computation; None is float32 on CPU and bfloat16 on accelerators. Parameters are float32.
    """

    model_type: str
    head: Head
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    activation: str = "silu"
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    rope: Rope = Rope()
    initializer_range: float = 0.02
    remat: Remat = "auto"
    dtype: str | None = None


class _Fields:
    """Typed access to config.json that collects every problem."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.problems: list[str] = []

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            found = "missing" if value is None else f"{value!r}"
            self.problems.append(f"config.json: {name} must be a positive whole number; it is {found}")
            return 1
        return value

    def number(self, name: str, default: float, source: Mapping[str, Any] | None = None) -> float:
        value = (self.data if source is None else source).get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problems.append(f"config.json: {name} must be a number; it is {value!r}")
            return default
        return float(value)

    def switch(self, rule: bool | str) -> bool:
        if isinstance(rule, bool):
            return rule
        value = self.data.get(rule) or False
        if not isinstance(value, bool):
            self.problems.append(f"config.json: {rule} must be true or false; it is {value!r}")
        return bool(value)


def parse(hf_config: Mapping[str, Any], head: Head = "lm", *, dtype: str | None = None) -> DecoderConfig:
    """The decoder that a config.json describes.

    Raises InputError with one line a problem: an unknown `model_type`, a missing or mistyped field, or one whose
    value the decoder cannot honour.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported; the decoder reads {known}."
            f"{near(model_type, ARCHITECTURES)}"
        )
    rules = ARCHITECTURES[model_type]
    read = _Fields(hf_config)
    hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
    layers = read.positive("num_hidden_layers")
    kv_heads = read.positive("num_key_value_heads", heads)
    head_dim = read.positive("head_dim", rules.head_dim or max(hidden // heads, 1))
    if not read.problems:
        _check_heads(read, rules, hidden, heads, kv_heads, head_dim)
    activation = hf_config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        read.problems.append(
            f"config.json: hidden_act {activation!r} is not supported; choose one of {', '.join(ACTIVATIONS)}"
        )
    if hf_config.get("quantization_config"):
        read.problems.append(
            "config.json: quantization_config is not supported; use the unquantized checkpoint"
        )
    config = DecoderConfig(
        model_type=model_type,
        head=head,
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        activation=activation,
        tied=read.switch("tie_word_embeddings"),
        qkv_bias=read.switch(rules.qkv_bias),
        o_bias=read.switch(rules.o_bias),
        mlp_bias=read.switch(rules.mlp_bias),
        qk_norm=rules.qk_norm,
        windows=_windows(read, rules, layers),
        rope=_rope(read),
        initializer_range=read.number("initializer_range", 0.02),
        dtype=dtype,
    )
    if read.problems:
        raise InputError(*read.problems)
    return config


def _check_heads(
    read: _Fields, rules: Architecture, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    if heads % kv_heads:
        read.problems.append(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if read.data.get("head_dim") is None and rules.head_dim is None and hidden % heads:
        read.problems.append(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim"
        )
    elif head_dim % 2:
        read.problems.append(f"config.json: head_dim {head_dim} must be even for rotary embeddings")


def _windows(read: _Fields, rules: Architecture, layers: int) -> tuple[int | None, ...]:
    if rules.windowed is None or not read.switch(rules.windowed) or read.data.get("sliding_window") is None:
        return (None,) * layers
    window = read.positive("sliding_window")
    kinds = read.data.get("layer_types")
    if kinds is None:  # transformers 4: the first layers see everything
        full = int(read.number("max_window_layers", 28))
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        read.problems.append(
            f"config.json: layer_types must be full_attention or sliding_attention, one for each of {layers} "
            f"layers; it has {len(kinds)} of {', '.join(sorted(map(repr, set(kinds))))}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(read: _Fields) -> Rope:
    modern = read.data.get("rope_parameters")
    table = modern or read.data.get("rope_scaling") or {}
    where = "rope_parameters" if modern else "rope_scaling"
    if not isinstance(table, Mapping):
        read.problems.append(f"config.json: {where} must be a table; it is {table!r}")
        return Rope()
    kind = table.get("rope_type", table.get("type")) or "default"
    theta = read.number("rope_theta", read.number("rope_theta", 10_000.0), table)
    if kind not in ("default", "linear", "llama3"):
        read.problems.append(
            f"config.json: {where}.rope_type {kind!r} is not supported; the decoder has default, linear, llama3"
        )
        return Rope()
    for source in (table, read.data):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            read.problems.append("config.json: partial_rotary_factor other than 1 is not supported")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }[kind]
    read.problems += [f"config.json: {where}.{name} is missing" for name in needed if table.get(name) is None]
    return Rope(
        kind,
        theta,
        read.number("factor", 1.0, table),
        read.number("low_freq_factor", 1.0, table),
        read.number("high_freq_factor", 4.0, table),
        int(read.number("original_max_position_embeddings", 8192, table)),
    )
