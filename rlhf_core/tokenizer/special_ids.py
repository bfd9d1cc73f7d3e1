"""Ids that mean something to training and sampling, above all those that end a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.errors import InputError, read_json_object
from rlhf_core.tokenizer.chat_template import ChatTemplate
from rlhf_core.tokenizer.text_options import TextOptions


class Special(NamedTuple):
    """Ids that mean something to training and sampling."""

    bos: int | None
    eos: tuple[int, ...]
    """All that end a sequence, the tokenizer's own first; empty where there is none."""
    pad: int | None


def special_ids(tokenizer: Any, chat_template: str | TextOptions | None = None) -> Special:
    """Special ids. What ends a sequence is the tokenizer's EOS, what a generation_config.json beside the tokenizer
    names, and the token that the chat template ends a reply with (chat_template: as in `template_text`, or options).

    Raises InputError for a generation_config.json that cannot be read.
    """
    eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    place = getattr(tokenizer, "name_or_path", None)
    beside = Path(str(place)) / "generation_config.json" if place else None
    if beside is not None and beside.is_file():
        eos += [i for i in stop_ids_in(beside) if i not in eos and i < len(tokenizer)]
    turn = ChatTemplate(tokenizer, chat_template).end_of_turn()
    if turn is not None and turn not in eos:
        eos.append(turn)
    return Special(tokenizer.bos_token_id, tuple(eos), tokenizer.pad_token_id)


def stop_ids_in(file: Path) -> list[int]:
    """The `eos_token_id` of a generation_config.json, each id once. Raises InputError for what is no list of ids."""
    listed = read_json_object(file, "fetch it again, or delete it").get("eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise InputError(f"{file}: eos_token_id is {json.dumps(listed)}, not a token id or a list of them")
    return list(dict.fromkeys(ids))
