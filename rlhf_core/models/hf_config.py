"""Parse a Hugging Face config.json, as transformers 4 or 5 writes it, into the decoder's configuration.

A value that the decoder cannot honour is an error that names the field, never a silent guess.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_core.contracts import ModelFamily
from rlhf_core.contracts.models import Head
from rlhf_core.errors import InputError, counted, suggest
from rlhf_core.models.config import DecoderConfig, Rope, RopeKind
from rlhf_core.models.decoder import Decoder
from rlhf_core.models.families import ARCHITECTURES, FULL, SLIDING, Architecture, rotated_layers
from rlhf_core.models.layers import ACTIVATIONS
from rlhf_core.models.quantized_files import FP8_BLOCK, METHODS

COMMON: Mapping[str, Any] = {
    "model_type": None,
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": None,
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "layer_types": None,
}
"""Fields that every family reads, with Hugging Face's defaults."""

_STORED = """
    mtp_num_hidden_layers mtp_use_dedicated_embeddings num_nextn_predict_layers mamba_ssm_dtype
    architectures auto_map name_or_path transformers_version transformers.js_config dtype torch_dtype use_bfloat16
    tokenizer_class model_max_length unsloth_version unsloth_fixed is_llama_config
"""
_RUN = """
    use_cache cache_implementation attn_implementation experts_implementation pretraining_tp torchscript
    chunk_size_feed_forward return_dict return_dict_in_generate output_hidden_states output_attentions output_scores
    is_decoder tie_encoder_decoder gradient_checkpointing
"""
_TASKS_AND_TOKENS = """
    id2label label2id num_labels problem_type finetuning_task task_specific_params bos_token_id eos_token_id
    pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id prefix pad_token image_token_id video_token_id audio_token_id vision_token_id
    vision_start_token_id vision_end_token_id
"""
_GENERATION = """
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty
"""
# Families that choose layers by it list it among their own fields; files of other families have it, too.
_WINDOWS = " max_window_layers "
# Trainers warn about dropout.
_TRAINING = """
    attention_dropout hidden_dropout resid_pdrop embd_pdrop classifier_dropout router_aux_loss_coef
    output_router_logits
"""
NO_EFFECT = frozenset((_STORED + _RUN + _TASKS_AND_TOKENS + _GENERATION + _WINDOWS + _TRAINING).split())
"""Fields that do not affect what the decoder computes."""

ONLY: Mapping[str, Any] = {
    "is_causal": True,
    "decoder_sparse_step": 1,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "attn_output_gate": True,
    "output_gate_type": "swish",
}
"""Fields with the only value that the decoder supports."""


LARGEST_SIZE = 2**31 - 1
"""Limit of sizes: the largest index."""

_SHOWN = reprlib.Repr()
_SHOWN.maxlevel = 4
_SHOWN.maxlist = _SHOWN.maxdict = 64
_SHOWN.maxstring = _SHOWN.maxother = 300
_SHOWN.maxlong = 60


def shown(value: Any) -> str:
    """Format a field's value for a message, as Python writes it, shortened if it is large or deep."""
    return _SHOWN.repr(value)


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says of the text model: its `text_config`, if it describes more, or all of it.

    What only the whole file says counts, too; its `tie_word_embeddings` takes precedence, as in transformers 5.
    """
    inner = hf_config.get("text_config")
    if not isinstance(inner, Mapping):
        return hf_config
    outer = {name: hf_config[name] for name in _TASKS_AND_TOKENS.split() if name in hf_config}
    inner = {name: value for name, value in inner.items() if value is not None or name not in outer}
    decisive = ("tie_word_embeddings", "quantization_config")
    return {**outer, **inner, **{name: hf_config[name] for name in decisive if name in hf_config}}


def with_text_config(hf_config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with other fields of the text model, which the whole file may repeat."""
    inner = hf_config.get("text_config")
    if not isinstance(inner, Mapping):
        return {**hf_config, **fields}
    repeated = {name: value for name, value in fields.items() if name in hf_config}
    return {**hf_config, **repeated, "text_config": {**inner, **fields}}


class ConfigFields:
    """One config.json with a family's defaults. `problems` has a line per field with an unusable value."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.data = data
        self.defaults = {**COMMON, **defaults}
        self.quantized: tuple[str, ...] = METHODS
        """Each `quant_method` of weights that can be read."""
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        """Note what is wrong with the file; `parse` raises InputError with all of it."""
        self.problems.append(f"config.json: {text}")

    def get(self, name: str) -> Any:
        """Return the file's value, null included, or the family's default."""
        return self.data.get(name, self.defaults.get(name))

    def has(self, name: str) -> bool:
        """Whether the family knows the field."""
        return name in self.defaults

    def whole(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_SIZE
    ) -> int:
        """Read a whole number; where it is missing or null, return `default` or note a problem."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
            self.problem(f"{name} must be {kind}; it is {'missing' if value is None else shown(value)}")
            return max(least, 1)
        if value > most:
            self.problem(f"{name} must be at most {most:,}; it is {shown(value)}")
            return max(least, 1)
        return value

    def number(self, name: str, default: float) -> float:
        """Read a number; where it is missing or null, return `default`."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.problem(f"{name} must be a number; it is {shown(value)}")
            return default
        return float(value)

    def positive(self, name: str) -> float | None:
        """Read a positive number; None where the family has no such field or it is null."""
        if not self.has(name) or self.get(name) is None:
            return None
        value = self.number(name, 1.0)
        if value <= 0:
            self.problem(f"{name} must be positive; it is {shown(value)}")
            return 1.0  # what reads on may divide by it
        return value

    def switch(self, rule: bool | str) -> bool:
        """Return `rule`, or read the field that it names."""
        if isinstance(rule, bool):
            return rule
        value = self.get(rule) or False
        if not isinstance(value, bool):
            self.problem(f"{rule} must be true or false; it is {shown(value)}")
        return bool(value)

    def flags(self, name: str, length: int) -> list[bool] | None:
        """Read the first `length` entries of a list of 0 and 1; None where it is missing or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length or any(x not in (0, 1) for x in value):
            self.problem(
                f"{name} must be a list of 0 and 1, one for each of {length} layers; it is {shown(value)}"
            )
            return [True] * length
        return [bool(x) for x in value[:length]]

    def of(self, table: Mapping[str, Any]) -> ConfigFields:
        """Return the fields of a table within the file, to read them likewise."""
        return ConfigFields(table, dict.fromkeys(table))

    def check_unknown(self, model_type: str) -> None:
        """Note a problem for every field that the decoder does not read, unless it is empty or has no effect."""
        for name, value in self.data.items():
            if name in self.defaults or name in NO_EFFECT or name.startswith("_"):
                continue
            if name in ONLY:
                if value not in (None, ONLY[name]):
                    self.problem(
                        f"{name} {shown(value)} is not supported; the decoder has {ONLY[name]!r} only"
                    )
            elif not value:
                continue
            elif name == "quantization_config":
                self._check_quantization(value)
            else:
                hint = suggest(name, self.defaults) or " Remove it if it changes nothing."
                self.problem(
                    f"unknown field '{name}'.{hint} It is {shown(value)}, which the {model_type} decoder does "
                    "not implement"
                )

    def _check_quantization(self, table: Any) -> None:
        method = table.get("quant_method") if isinstance(table, Mapping) else None
        if method not in self.quantized:
            known = ", ".join(self.quantized)
            self.problem(
                f"quantization_config.quant_method {shown(method)} is not supported, only {known} are; use the "
                "unquantized checkpoint, with lora.base = 'nf4' if memory is short"
            )
        elif method == "fp8" and table.get("weight_block_size") not in (None, [FP8_BLOCK, FP8_BLOCK]):
            self.problem(
                f"quantization_config.weight_block_size must be [{FP8_BLOCK}, {FP8_BLOCK}]; it is "
                f"{shown(table['weight_block_size'])}"
            )


GROWTH = "llama_4_scaling_beta"
ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
UNUSED = {"finetuned", "original_max_position_embeddings"}
NEEDED: Mapping[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
OPTIONAL: Mapping[RopeKind, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor", "factor"),
    "proportional": ("factor",),
}


def read_ropes(
    read: ConfigFields, rules: Architecture, kinds: Sequence[str], rotated: Sequence[bool], head_dim: int
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Read (the distinct rotary embeddings, each layer's index among them: empty where all have the first).

    kinds: FULL or SLIDING per layer. rotated: whether each layer has a rotary embedding at all.
    """
    tables = _tables(read, rules)
    made = {kind: _rope(read, rules, *tables[kind], head_dim) for kind in dict.fromkeys(kinds)}
    layers = [made[kind] if on else Rope("none") for kind, on in zip(kinds, rotated, strict=True)]
    distinct = tuple(dict.fromkeys(layers))
    return distinct, tuple(distinct.index(rope) for rope in layers) if len(distinct) > 1 else ()


def _tables(read: ConfigFields, rules: Architecture) -> dict[str, tuple[str, dict[str, Any]]]:
    """Read {kind of layer: (name of its rope table, the table with `rope_theta`)}."""
    modern = read.get("rope_parameters")
    legacy = read.get("rope_scaling")
    if modern and legacy and modern != legacy:
        read.problem("rope_parameters and rope_scaling both say how to rotate positions; keep one of them")
    if modern:
        where, table = "rope_parameters", modern
    else:
        where = "rope_scaling"
        table = legacy or {}
    if isinstance(table, Mapping) and (FULL in table or SLIDING in table):
        for stranger in set(table) - {FULL, SLIDING}:
            read.problem(f"{where}.{stranger} is not supported together with {FULL} and {SLIDING}")
        tables = {}
        for kind in (FULL, SLIDING):
            name = f"{where}.{kind}"
            tables[kind] = name, _with_theta(read, kind, table.get(kind) or {}, name)
        return tables
    parts: dict[str, Any] = {FULL: table, SLIDING: table}
    if not modern and rules.scaled_rope is not None:
        for kind in parts:
            if kind != rules.scaled_rope:
                parts[kind] = {}
    if read.has("rope_local_base_freq"):
        if modern:
            read.problem(f"rope_parameters must have the tables {FULL} and {SLIDING}")
        parts[SLIDING] = {}
    return {kind: (where, _with_theta(read, kind, part, where)) for kind, part in parts.items()}


def _with_theta(read: ConfigFields, kind: str, table: Any, where: str) -> dict[str, Any]:
    """Add the base of the frequencies, `rope_theta`, to a rope table that does not have its own."""
    if not isinstance(table, Mapping):
        read.problem(f"{where} must be a table; it is {shown(table)}")
        table = {}
    local = kind == SLIDING and read.has("rope_local_base_freq")
    theta = read.number("rope_local_base_freq" if local else "rope_theta", 10_000.0)
    return {"rope_theta": theta, **{name: value for name, value in table.items() if value is not None}}


def _rope(read: ConfigFields, rules: Architecture, where: str, table: dict[str, Any], head_dim: int) -> Rope:
    named: Any = table.get("rope_type", table.get("type")) or "default"
    if named == "mrope" and "mrope_section" in rules.rope_fields:
        # One position per token is all that text has of the three of multimodal rotary embeddings.
        named = "default"
    kind: RopeKind = "longrope" if named in rules.longrope else named
    known = list(NEEDED)
    if not rules.longrope:
        known.remove("longrope")
    if kind not in known:
        read.problem(f"{where}.rope_type {shown(kind)} is not supported; the decoder has {', '.join(known)}")
        return Rope()
    used = {*NEEDED[kind], *OPTIONAL.get(kind, ())}
    complete = _check_rope_fields(read, rules, where, table, kind)
    share = _rotated_share(read, rules, where, table, kind, head_dim)
    longest = read.whole("max_position_embeddings", 2048)
    original = "original_max_position_embeddings"
    # As in transformers, the file's own field takes precedence over the table's.
    fields = {**table, original: read.get(original) or table.get(original)}
    numbers = ConfigFields(fields, dict.fromkeys(used))
    for name in sorted((used | {"rope_theta"}) - {"short_factor", "long_factor", "truncate"}):
        numbers.positive(name)
    length = numbers.whole(original, longest)
    growth = numbers.number(GROWTH, 0.0)
    read.problems += [line.replace("config.json: ", f"config.json: {where}.") for line in numbers.problems]
    if not complete or numbers.problems:
        return Rope()
    rope = Rope(
        kind,
        float(table["rope_theta"]),
        float(table.get("factor", 1.0)),
        float(table.get("low_freq_factor", 1.0)),
        float(table.get("high_freq_factor", 4.0)),
        length,
        share=share,
        growth=growth,
    )
    if kind == "yarn":
        return _yarn(rope, table)
    if kind == "longrope":
        return _longrope(read, where, rope, table, longest, head_dim)
    return rope


def _check_rope_fields(
    read: ConfigFields, rules: Architecture, where: str, table: Mapping[str, Any], kind: RopeKind
) -> bool:
    """Report fields that mean nothing for this kind, and those that are missing; return whether none is missing."""
    used = {*NEEDED[kind], *OPTIONAL.get(kind, ())}
    for name in sorted(set(table) - used - ALWAYS - UNUSED - set(rules.rope_fields)):
        read.problem(f"{where}.{name} {shown(table[name])} has no meaning for rope_type {shown(kind)}")
    missing = [name for name in NEEDED[kind] if table.get(name) is None]
    for name in missing:
        read.problem(f"{where}.{name} is missing")
    return not missing


def _rotated_share(
    read: ConfigFields,
    rules: Architecture,
    where: str,
    table: Mapping[str, Any],
    kind: RopeKind,
    head_dim: int,
) -> float:
    """Read the share of a head's numbers that are rotated."""
    share = table.get("partial_rotary_factor", read.get("partial_rotary_factor"))
    if share is None or share == 1:
        return 1.0
    partial = rules.partial_rotary or kind == "proportional"
    if not partial or not isinstance(share, float) or not 0 < share < 1:
        read.problem(
            f"{where}.partial_rotary_factor other than 1 is not supported here; it is {shown(share)}"
        )
        return 1.0
    if kind != "proportional" and int(head_dim * share) % 2:
        read.problem(
            f"{where}.partial_rotary_factor {shown(share)} of head_dim {head_dim} is not an even number"
        )
    return share


def _yarn(rope: Rope, table: Mapping[str, Any]) -> Rope:
    """Set yarn's magnitude, 0.1 ln(factor) + 1 or a ratio of two such terms; logits grow with its square."""

    def gain(slope: float) -> float:
        return 0.1 * slope * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    magnitude = table.get("attention_factor")
    if magnitude is None:
        up, down = table.get("mscale"), table.get("mscale_all_dim")
        magnitude = gain(up) / gain(down) if up and down else gain(1.0)
    fast, slow = (float(table.get(name) or least) for name, least in (("beta_fast", 32), ("beta_slow", 1)))
    truncate = bool(table.get("truncate", True))
    return replace(rope, beta_fast=fast, beta_slow=slow, truncate=truncate, magnitude=float(magnitude))


def _longrope(
    read: ConfigFields, where: str, rope: Rope, table: Mapping[str, Any], longest: int, head_dim: int
) -> Rope:
    """Use the frequencies of short contexts: with the long ones, a sequence would depend on the rest of its batch."""
    divisors = table["short_factor"]
    pairs = int(head_dim * rope.share) // 2
    numeric = isinstance(divisors, list) and all(isinstance(x, int | float) for x in divisors)
    if not numeric or len(divisors) != pairs:
        read.problem(f"{where}.short_factor must be a list of {pairs} numbers; it is {shown(divisors)}")
        return Rope()
    magnitude = table.get("attention_factor")
    factor = table.get("factor", longest / rope.original_length)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(rope.original_length)) if factor > 1 else 1.0
    # The factor is in the magnitude alone.
    return replace(rope, factor=1.0, magnitude=float(magnitude), divisors=tuple(map(float, divisors)))


EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Names of one field, which differs among families and versions of transformers."""
MOST = 10_000
"""More layers, or experts, than any model has: a config.json is damaged, and lists of so many would fill the memory."""


def parse(
    hf_config: Mapping[str, Any], architectures: Mapping[str, Architecture] = ARCHITECTURES
) -> DecoderConfig:
    """Parse a config.json.

    Raises InputError with one line per problem: an unknown `model_type`, a missing or mistyped field, or one whose
    value the decoder cannot honour.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in architectures:
        known = ", ".join(sorted(architectures))
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported; the decoder reads {known}."
            f"{suggest(model_type, architectures)}"
        )
    rules = architectures[model_type]
    read = ConfigFields(hf_config, rules.defaults)
    hidden = read.whole("hidden_size")
    heads = read.whole("num_attention_heads")
    layers = read.whole("num_hidden_layers", most=MOST)
    kv_heads = read.whole("num_key_value_heads", heads)
    head_dim = _head_dim(read, hidden, heads)
    if not read.problems:
        _check_heads(read, heads, kv_heads, head_dim)
    types = _layer_types(read, rules, model_type, layers)
    window = read.whole("sliding_window") if SLIDING in types else None
    attention = [FULL if kind in rules.layers else kind for kind in types]
    ropes, layer_ropes = read_ropes(read, rules, attention, rotated_layers(read, layers), head_dim)
    experts = _experts(read)
    scalar = read.positive("query_pre_attn_scalar")

    def factor(name: str) -> float:
        return read.positive(name) or 1.0

    config = DecoderConfig(
        model_type=model_type,
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
        query_scale=read.positive("attention_multiplier") if scalar is None else scalar**-0.5,
        norms=rules.norms,
        norm_offset=rules.norm_offset,
        fused=rules.fused,
        embedding_scale=math.sqrt(hidden) if rules.scaled_embedding else factor("embedding_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1 / factor("logits_scaling"),
        attention_softcap=read.positive("attn_logit_softcapping"),
        logit_softcap=read.positive("final_logit_softcapping"),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        ropes=ropes,
        layer_ropes=layer_ropes,
        experts=experts,
        experts_per_token=read.whole("num_experts_per_tok") if experts else 0,
        normalise_experts=read.switch(rules.normalise_experts),
        weight_names=tuple(rules.weight_names.items()),
        initializer_range=read.number("initializer_range", 0.02),
        kinds=tuple(types) if rules.layers else (),
        variants=tuple((kind, (("layer", layer),)) for kind, layer in rules.layers.items()),
    )
    if rules.details is not None:
        config = replace(config, **rules.details(read, layers))
    if config.experts_per_token > config.experts:
        read.problem(
            f"num_experts_per_tok {config.experts_per_token} is more than the "
            f"{counted(config.experts, 'experts')} of a layer"
        )
    read.check_unknown(model_type)
    if read.problems:
        raise InputError(*dict.fromkeys(read.problems))
    return config


def _head_dim(read: ConfigFields, hidden: int, heads: int) -> int:
    if read.get("head_dim") is not None:
        return read.whole("head_dim")
    if hidden % heads and not read.problems:
        read.problem(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}: set head_dim")
    return max(hidden // heads, 1)


def _check_heads(read: ConfigFields, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        read.problem(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        read.problem(f"head_dim {head_dim} must be even for rotary embeddings")


def _activation(read: ConfigFields, rules: Architecture) -> str:
    name = read.get(rules.activation) or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        read.problem(
            f"{rules.activation} {shown(name)} is not supported; choose one of {', '.join(ACTIVATIONS)}"
        )
    elif read.data.get("hidden_act", name) not in (name, None):
        read.problem(
            f"hidden_act {read.data['hidden_act']!r} is not {rules.activation} {shown(name)}: remove one"
        )
    return str(name)


def _layer_types(read: ConfigFields, rules: Architecture, model_type: str, layers: int) -> list[str]:
    """Read the type of each layer: FULL, SLIDING, or a name of `rules.layers`."""
    allowed = (FULL, *rules.layers) if rules.layers else (FULL, SLIDING)
    kinds = [FULL] * layers if rules.layer_types is None else rules.layer_types(read, layers)
    stored = read.get("layer_types")
    if stored is not None:
        one_each = isinstance(stored, list) and len(stored) == layers
        if not one_each or any(kind not in allowed for kind in stored):
            read.problem(
                f"layer_types must be {' or '.join(allowed)}, one for each of {layers} layers; it is {shown(stored)}"
            )
        elif rules.layer_types_decide or rules.layers:
            kinds = stored
            if SLIDING in kinds and read.get("use_sliding_window") is False:
                read.problem(f"layer_types has {SLIDING}, but use_sliding_window is false")
        elif stored != kinds:
            read.problem(
                f"layer_types {shown(stored)} is not supported in {model_type}: its layers are {kinds!r}"
            )
    lost = sorted(set(kinds) - set(allowed))
    if lost:
        read.problem(f"layer_types: {lost[0]!r} is none of {', '.join(allowed)}, the layers of {model_type}")
        return [FULL] * layers
    return kinds


def _experts(read: ConfigFields) -> int:
    """Read the number of experts; 0 for a family that has none in every model."""
    if not any(read.defaults.get(name) for name in EXPERT_COUNTS):
        return 0
    names = [name for name in EXPERT_COUNTS if read.has(name)]
    counts = {name: read.data[name] for name in names if read.data.get(name) is not None}
    if len(set(map(str, counts.values()))) > 1:
        read.problem(" and ".join(f"{name} {shown(value)}" for name, value in counts.items()) + " differ")
    return read.whole(next(iter(counts or names)), most=MOST) if names else 0


@dataclass(frozen=True)
class DecoderFamily(ModelFamily):
    """A family of decoders, by their descriptions."""

    architectures: Mapping[str, Architecture] = field(default_factory=dict)


def decoder_family(architectures: Mapping[str, Architecture]) -> DecoderFamily:
    """Make the family of the models in `architectures`, by the `model_type` of their config.json.

    A package that describes such models registers them: registry.add(MODEL, "name", decoder_family({...})).
    """

    def define(hf_config: Mapping[str, Any], head: Head) -> Decoder:
        return Decoder(config=parse(hf_config, architectures), head=head)

    return DecoderFamily(tuple(architectures), define, architectures)


DECODER = decoder_family(ARCHITECTURES)
"""The families that core itself describes."""
