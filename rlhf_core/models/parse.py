"""From a Hugging Face config.json, as transformers 4 or 5 writes it, to what the decoder computes.

Whatever the decoder cannot honour is an error naming the field and its value, never a silent guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_core.attention_kind import AttentionOver
from rlhf_core.errors import InputError, near
from rlhf_core.models.config import DecoderConfig, Head, Remat
from rlhf_core.models.families import ARCHITECTURES, FULL, SLIDING, Architecture, turned_layers
from rlhf_core.models.fields import Fields, shown
from rlhf_core.models.ropes import read_ropes

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Names of one field: families and versions of transformers differ in which they write."""
MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
MOST_PARAMETERS = 10**14
"""Beyond any model: a config.json with more is damaged, and no machine could hold what it describes."""
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


def parse(
    hf_config: Mapping[str, Any],
    head: Head = "lm",
    *,
    dtype: str | None = None,
    remat: Remat = "auto",
    attention: AttentionOver | None = None,
    architectures: Mapping[str, Architecture] = ARCHITECTURES,
) -> DecoderConfig:
    """The decoder that a config.json describes; dtype, remat and attention are as in `DecoderConfig`.

    Raises InputError with one line a problem: an unknown `model_type`, a missing or mistyped field, or one whose
    value the decoder cannot honour.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in architectures:
        known = ", ".join(sorted(architectures))
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported; the decoder reads {known}."
            f"{near(model_type, architectures)}"
        )
    rules = architectures[model_type]
    read = Fields(hf_config, rules.defaults)
    hidden, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    layers = read.whole("num_hidden_layers", most=MOST_LAYERS)
    kv_heads, head_dim = read.whole("num_key_value_heads", heads), _head_dim(read, hidden, heads)
    if not read.problems:
        _check_heads(read, heads, kv_heads, head_dim)
    kinds, windows = _windows(read, rules, model_type, layers)
    ropes, layer_ropes = read_ropes(read, rules, kinds, turned_layers(read, layers), head_dim)
    experts = _experts(read)
    scalar = read.positive("query_pre_attn_scalar")
    config = DecoderConfig(
        model_type=model_type,
        head=head,
        vocab_size=read.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.whole(rules.expert_size if experts else "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        activation=_activation(read, rules),
        tied=read.switch("tie_word_embeddings"),
        qkv_bias=read.switch(rules.qkv_bias),
        o_bias=read.switch(rules.o_bias),
        mlp_bias=read.switch(rules.mlp_bias),
        qk_norm=rules.qk_norm,
        query_scale=None if scalar is None else scalar**-0.5,
        norms=rules.norms,
        norm_offset=rules.norm_offset,
        fused=rules.fused,
        embedding_scale=math.sqrt(hidden) if rules.scaled_embedding else 1.0,
        attention_softcap=read.positive("attn_logit_softcapping"),
        logit_softcap=read.positive("final_logit_softcapping"),
        windows=windows,
        ropes=ropes,
        layer_ropes=layer_ropes,
        experts=experts,
        experts_per_token=read.whole("num_experts_per_tok") if experts else 0,
        normalise_experts=read.switch(rules.normalise_experts),
        weight_names=tuple(rules.weight_names.items()),
        initializer_range=read.number("initializer_range", 0.02),
        remat=remat,
        dtype=dtype,
        attention=attention,
    )
    if config.experts_per_token > experts:
        read.problem(
            f"num_experts_per_tok {config.experts_per_token} is more than there are experts, {experts}"
        )
    if not read.problems and (count := _parameters(config)) > MOST_PARAMETERS:
        read.problem(f"its sizes make a model of {count:.2g} parameters; which of them is wrong?")
    read.check_unknown(model_type)
    if read.problems:
        raise InputError(*dict.fromkeys(read.problems))
    return config


def _parameters(config: DecoderConfig) -> int:
    """About how many parameters the model has."""
    heads = config.num_heads + config.num_kv_heads
    layer = 2 * heads * config.head_dim + 3 * config.intermediate_size * max(config.experts, 1)
    return config.hidden_size * (config.vocab_size + config.num_layers * layer)


def _head_dim(read: Fields, hidden: int, heads: int) -> int:
    if read.get("head_dim") is not None:
        return read.whole("head_dim")
    if hidden % heads and not read.problems:
        read.problem(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim")
    return max(hidden // heads, 1)


def _check_heads(read: Fields, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        read.problem(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        read.problem(f"head_dim {head_dim} must be even for rotary embeddings")


def _activation(read: Fields, rules: Architecture) -> str:
    name = read.get(rules.activation) or "silu"
    if name not in ACTIVATIONS:
        read.problem(
            f"{rules.activation} {shown(name)} is not supported; choose one of {', '.join(ACTIVATIONS)}"
        )
    elif read.data.get("hidden_act", name) not in (name, None):
        read.problem(
            f"hidden_act {read.data['hidden_act']!r} is not {rules.activation} {shown(name)}: remove one"
        )
    return str(name)


def _windows(
    read: Fields, rules: Architecture, model_type: str, layers: int
) -> tuple[list[str], tuple[int | None, ...]]:
    """(FULL or SLIDING a layer, its window a layer)."""
    kinds = [FULL] * layers if rules.layer_types is None else rules.layer_types(read, layers)
    given = read.get("layer_types")
    if given is not None and (
        not isinstance(given, list)
        or len(given) != layers
        or any(kind not in (FULL, SLIDING) for kind in given)
    ):
        read.problem(
            f"layer_types must be {FULL} or {SLIDING}, one for each of {layers} layers; it is {shown(given)}"
        )
    elif given is not None and rules.layer_types_decide:
        kinds = given
        if SLIDING in kinds and read.get("use_sliding_window") is False:
            read.problem(f"layer_types has {SLIDING}, but use_sliding_window is false")
    elif given is not None and given != kinds:
        read.problem(f"layer_types {shown(given)} is not supported in {model_type}: its layers are {kinds!r}")
    window = read.whole("sliding_window") if SLIDING in kinds else None
    return kinds, tuple(window if kind == SLIDING else None for kind in kinds)


def _experts(read: Fields) -> int:
    """How many; 0 for a family without."""
    names = [name for name in EXPERT_COUNTS if read.has(name)]
    given = {name: read.data[name] for name in names if read.data.get(name) is not None}
    if len(set(map(str, given.values()))) > 1:
        read.problem(" and ".join(f"{name} {shown(value)}" for name, value in given.items()) + " differ")
    return read.whole(next(iter(given or names)), most=MOST_EXPERTS) if names else 0
