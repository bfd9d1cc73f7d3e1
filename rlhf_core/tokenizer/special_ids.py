"""Find a tokenizer's special ids, above all those that end a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.errors import InputError, read_json_object
from rlhf_core.tokenizer.chat_template import ChatTemplate
from rlhf_core.tokenizer.text_options import TextOptions


def ids_without_token(tokenizer: Any, size: int) -> tuple[tuple[int, int], ...]:
    """Find which of `size` ids are no token of the tokenizer: ranges (first, one after the last), in order.

    They are what a vocabulary is padded with, and holes in the tokenizer's own ids.
    """
    present = np.zeros(size + 2, np.bool_)  # an absent id at both ends, so that every range has two borders
    present[[0, -1]] = True
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64) + 1
    present[ids[(ids > 0) & (ids <= size)]] = True
    # A piece that is in the vocabulary twice has one id there, and is a token under both.
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        for i in np.flatnonzero(~present):
            present[i] = backend.id_to_token(int(i) - 1) is not None
    borders = np.flatnonzero(np.diff(present)).reshape(-1, 2)
    return tuple((int(first), int(last)) for first, last in borders)


class Special(NamedTuple):
    """Special ids of a tokenizer."""

    bos: int | None
    eos: tuple[int, ...]
    """All ids that end a sequence, the tokenizer's EOS first; may be empty."""
    pad: int | None


def special_ids(tokenizer: Any, chat_template: str | TextOptions | None = None) -> Special:
    """Find the special ids of a tokenizer and its chat template.

    A sequence ends with the tokenizer's EOS, the ids in a generation_config.json beside the tokenizer, and the token
    that the chat template writes after a reply. chat_template: as in `template_text`, or options.
    Raises InputError for a generation_config.json that cannot be read.
    """
    eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    directory = getattr(tokenizer, "name_or_path", None)
    config = Path(str(directory)) / "generation_config.json" if directory else None
    if config is not None and config.is_file():
        eos += [i for i in stop_ids_in(config) if i not in eos and i < len(tokenizer)]
    end_of_turn = ChatTemplate(tokenizer, chat_template).end_of_turn()
    if end_of_turn is not None and end_of_turn not in eos:
        eos.append(end_of_turn)
    return Special(tokenizer.bos_token_id, tuple(eos), tokenizer.pad_token_id)


def stop_ids_in(file: Path) -> list[int]:
    """Read the distinct `eos_token_id` of a generation_config.json. Raises InputError if they are not ids."""
    listed = read_json_object(file, "fetch it again, or delete it").get("eos_token_id")
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise InputError(f"{file}: eos_token_id is {json.dumps(listed)}, not a token id or a list of them")
    return list(dict.fromkeys(ids))
