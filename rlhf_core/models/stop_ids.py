"""The tokens that end a completion, where a model directory keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core.errors import read_json_object
from rlhf_core.special_ids import stop_ids_in

GENERATION = "generation_config.json"


def stop_ids_of(directory: Path) -> list[int]:
    """Those that the directory's generation_config.json names."""
    file = directory / GENERATION
    return stop_ids_in(file) if file.is_file() else []


def save_stop_ids(stop_ids: Sequence[int], tokenizer: Any, directory: Path) -> None:
    """Have generation_config.json name the stop ids that whoever loads the directory would not find otherwise."""
    if set(stop_ids) <= {tokenizer.eos_token_id, *stop_ids_of(directory)}:
        return
    file = directory / GENERATION
    rest = read_json_object(file) if file.is_file() else {}
    text = json.dumps({**rest, "eos_token_id": list(stop_ids)}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")
