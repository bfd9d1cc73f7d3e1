"""A model as a directory that other tools open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import InputError
from rlhf_core.models import load_model, stored_head

if TYPE_CHECKING:
    from rlhf_core.registry import Registry


def export(model: str, directory: Path, *, registry: Registry, merge: bool = False) -> str:
    """Write `model`, an artifact, a directory or a hub name, to a new directory in Hugging Face layout.

    Of a model with adapters, these alone in PEFT's layout, or with `merge` the whole model that they make. Returns what
    was written, in words.
    Raises InputError where the directory holds something already, or there is nothing to merge.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} exists already: give a new directory")
    head = stored_head(Path(model)) or "lm"
    loaded = load_model(model, head, registry=registry)
    lora = loaded.definition.lora
    if merge and lora is None:
        raise InputError(f"{model} has no adapters to merge; leave out --merge")
    (loaded.merged() if merge else loaded).save(directory)
    if lora is not None and not merge:
        assert loaded.adapter is not None
        return f"an adapter of {loaded.adapter['base_model_name_or_path']}, for PEFT"
    return "a reward model" if head == "score" else "a language model"
