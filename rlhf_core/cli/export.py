"""A model as a directory that other tools open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import InputError
from rlhf_core.models import Model, load_model, stored_head
from rlhf_core.models.loading import local_directory
from rlhf_core.models.weights import INDEX, open_weights
from rlhf_core.runtime.files import fill_directory

if TYPE_CHECKING:
    from rlhf_core.plugins.registry import Registry

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""How files end that hold tensors, which are compared by name."""


def export(model: str, directory: Path, *, registry: Registry, merge: bool = False) -> str:
    """Write `model`, an artifact, a directory or a hub name, to a new directory in Hugging Face layout.

    A model with adapters is written as these alone in PEFT's layout, or with `merge` as the whole model that they make.
    Returns what was written and what of the source was not, in words. Raises InputError where the directory holds
    something already, or there is nothing to merge; RunError where the disk is full or not writable, with nothing left.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} exists already: give a new directory")
    source = local_directory(model)
    head = stored_head(source) or "lm"
    loaded = load_model(model, head, registry=registry)
    lora = loaded.definition.lora
    if merge and lora is None:
        raise InputError(f"{model} has no adapters to merge; leave out --merge")
    whole = loaded.merged() if merge else loaded
    fill_directory(directory, whole.save, f"the model {model}")
    kind = "a reward model" if head == "score" else "a language model"
    if lora is not None and not merge:
        assert loaded.adapter is not None
        of = "a reward model's adapter" if head == "score" else "an adapter"
        kind = f"{of} of {loaded.adapter['base_model_name_or_path']}, for PEFT"
    left_out = _left_out(source, directory, loaded)
    return f"{kind}; left out: {', '.join(left_out)}" if left_out else kind


def _left_out(source: Path, written: Path, model: Model) -> list[str]:
    """Name the files of the source, and the tensors in its files, that were not written."""
    there = {path.name for path in written.iterdir()}
    files = [path.name for path in sorted(source.iterdir()) if path.is_file() and path.name not in there]
    names = [name for name in files if not name.endswith(WEIGHTS) and not name.startswith(".")]
    if all(
        any((place / name).is_file() for name in ("model.safetensors", INDEX)) for place in (source, written)
    ):
        # A tied head, and a table that the config determines, say nothing that is not in the other tensors.
        says_nothing = ["rotary_emb.inv_freq", *(["lm_head.weight"] if _tied(model) else [])]
        lost = sorted(set(open_weights(source)) - set(open_weights(written)))
        names += [name for name in lost if not name.endswith(tuple(says_nothing))]
    return names


def _tied(model: Model) -> bool:
    return bool(model.hf_config.get("tie_word_embeddings")) and model.definition.head == "lm"
