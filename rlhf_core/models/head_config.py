"""The part of a config.json that describes the model's head."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.contracts.models import Head
from rlhf_core.errors import InputError
from rlhf_core.models.config_fields import shown


def config_for(hf_config: Mapping[str, Any], head: Head, tokenizer: Any | None) -> dict[str, Any]:
    """Make the config.json for `head`: for "score", `…ForSequenceClassification` with one label and a `pad_token_id`.

    transformers reads the score at the rightmost token whose id is not the config's `pad_token_id`.
    """
    config = dict(hf_config)
    text = "Text" if config.get("model_type") == "gemma3_text" else ""  # only in its classifier's class
    ours, theirs = ("ForCausalLM", f"{text}ForSequenceClassification")
    if head == "lm":
        config["architectures"] = [name.replace(theirs, ours) for name in config.get("architectures") or []]
        return {k: v for k, v in config.items() if k not in ("id2label", "label2id", "num_labels")}
    config["architectures"] = [name.replace(ours, theirs) for name in config.get("architectures") or []]
    config.pop("num_labels", None)
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    pad = getattr(tokenizer, "pad_token_id", None)
    config["pad_token_id"] = config.get("pad_token_id") if pad is None else pad
    return config


def padding_apart(
    hf_config: Mapping[str, Any], tokenizer: Any | None, stop_ids: Sequence[int], vocab_size: int
) -> tuple[dict[str, Any], Any | None]:
    """Give a reward model's config and tokenizer a padding token that ends no sequence; return both.

    Without a tokenizer the first token of sequences pads, where the config names none. Warns where no token can pad.
    """
    named = hf_config.get("eos_token_id")
    ends = {*stop_ids, *(named if isinstance(named, list) else [named])}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: token.content for i, token in added.items() if token.special and i < vocab_size}
    own, first = hf_config.get("pad_token_id"), hf_config.get("bos_token_id")
    if tokenizer is None:
        pad = first if own is None else own
        pad = None if pad in ends else pad
    elif (pad := tokenizer.pad_token_id) is None or pad in ends:
        unknown = getattr(tokenizer, "unk_token_id", None)
        free = [i for i in special if i not in ends]
        pad = min(
            free, key=lambda i: (i != own, "pad" not in special[i].lower(), i == unknown, i), default=None
        )
        if pad is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.pad_token = special[pad]
    if pad is None and own is not None:
        warnings.warn(
            f"the tokenizer's pad token ({own}) also ends sequences, and it has no other that could pad. config.json "
            "names none, so transformers scores one sequence at a time: add a pad_token to tokenizer_config.json "
            "before training, if you need batches there",
            stacklevel=3,
        )
    return {**hf_config, "pad_token_id": pad}, tokenizer


def require_architectures(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError where `architectures`, which determines the head, is not a list of names."""
    named = config.get("architectures")
    if named is not None and (not isinstance(named, list) or any(not isinstance(n, str) for n in named)):
        raise InputError(f"{where}: architectures must be a list of names; it is {shown(named)}")
