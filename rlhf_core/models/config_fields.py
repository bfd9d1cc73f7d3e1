"""The fields of a config.json: typed access that collects all problems, and lists of fields to ignore."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rlhf_core.errors import suggest

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
    forced_eos_token_id prefix pad_token
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
"""
NO_EFFECT = frozenset((_STORED + _RUN + _TASKS_AND_TOKENS + _GENERATION + _WINDOWS + _TRAINING).split())
"""Fields that do not affect what the decoder computes."""

ONLY: Mapping[str, Any] = {
    "is_causal": True,
    "decoder_sparse_step": 1,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}
"""Fields with the only value that the decoder supports."""


LARGEST_SIZE = 2**31 - 1
"""Limit of sizes: the largest index."""
LARGEST_NUMBER = 3e38
"""Limit of other numbers: about the largest float32."""

_SHOWN = reprlib.Repr()
_SHOWN.maxlevel = 4
_SHOWN.maxlist = _SHOWN.maxdict = 64
_SHOWN.maxstring = _SHOWN.maxother = 300
_SHOWN.maxlong = 60


def shown(value: Any) -> str:
    """Format a field's value for a message, as Python writes it, shortened if it is large or deep."""
    try:
        return _SHOWN.repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"


class Fields:
    """One config.json with a family's defaults. `problems` has a line per field with an unusable value."""

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.data = data
        self.defaults = {**COMMON, **defaults}
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
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
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            self.problem(f"{name} must be a number; it is {shown(value)}")
            return default
        if abs(value) > LARGEST_NUMBER:
            self.problem(f"{name} must be at most {LARGEST_NUMBER:g}; it is {shown(value)}")
            return default
        return float(value)

    def positive(self, name: str) -> float | None:
        """Read a positive number; None where the family has no such field or it is null."""
        if not self.has(name) or self.get(name) is None:
            return None
        value = self.number(name, 1.0)
        if value <= 0:
            self.problem(f"{name} must be positive; it is {shown(value)}")
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
                self.problem("quantization_config is not supported; use the unquantized checkpoint")
            else:
                hint = suggest(name, self.defaults) or " Remove it if it changes nothing."
                self.problem(
                    f"unknown field '{name}'.{hint} It is {shown(value)}, which the decoder of {model_type} does not "
                    "compute"
                )
