"""The part of a config.json that describes the model's head."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rlhf_core.errors import InputError
from rlhf_core.models.config import Head
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
    if config["pad_token_id"] is None:
        # A first token never ends a sequence, so transformers still finds the last one.
        config["pad_token_id"] = config.get("bos_token_id")
    ends = config.get("eos_token_id")
    if config["pad_token_id"] in (ends if isinstance(ends, list) else [ends]) and ends is not None:
        warnings.warn(
            f"the tokenizer's pad token ({config['pad_token_id']}) also ends sequences. Scores here are right, but "
            "transformers, which skips padding, reads them one token before the end: set pad_token in "
            "tokenizer_config.json to another token before training, if you use the model there",
            stacklevel=3,
        )
    return config


def require_architectures(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError where `architectures`, which determines the head, is not a list of names."""
    named = config.get("architectures")
    if named is not None and (not isinstance(named, list) or any(not isinstance(n, str) for n in named)):
        raise InputError(f"{where}: architectures must be a list of names; it is {shown(named)}")
