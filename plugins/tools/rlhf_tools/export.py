"""Export a model to a directory that other tools can open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core import artifacts
from rlhf_core.errors import InputError, warn
from rlhf_core.models import Model, load_model, stored_head
from rlhf_core.models.hf_config import text_config
from rlhf_core.models.loading import local_directory
from rlhf_core.models.weights import INDEX, open_weights
from rlhf_core.runtime.files import fill_directory
from rlhf_core.scoring import ScoringContract
from rlhf_tools.reward_card import card, for_other_libraries

if TYPE_CHECKING:
    from rlhf_core.plugins.registry import Registry

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
"""Suffixes of files with tensors, which are compared by name."""


def export(
    model: str,
    directory: Path,
    *,
    registry: Registry,
    merge: bool = False,
    untied: bool = False,
    base: str | None = None,
) -> str:
    """Write `model`, an artifact, a directory or a hub name, to a new directory in Hugging Face layout.

    Of a model with adapters, only the adapters are written, in PEFT's layout, or the merged model if `merge`. A reward
    model's contract goes into its tokenizer and a README.md. untied: write an output head apart from the embeddings
    that it shares. base: the adapters' base model; None: the one they name.
    Returns a text: what was written, and what of the source was left out. Raises InputError if the directory is not
    empty or there is nothing to merge; RunError, leaving no files, if the disk is full or not writable.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} exists already: give a new directory")
    source = local_directory(model)
    head = stored_head(source) or "lm"
    loaded = load_model(base or model, head, adapter=base and model, registry=registry)
    lora = loaded.definition.lora
    if merge and lora is None:
        raise InputError(f"{model} has no adapters to merge; leave out --merge")
    whole = _merged(loaded) if merge else loaded
    if untied:
        if not _tied(loaded) or whole.adapter is not None:
            raise InputError(f"{model} has no output head that is its embeddings; leave out --untied")
        whole = whole.untied()
    readme = None
    recorded = artifacts.read_contract(source) if head == "score" else {}
    if "tokenizer_hash" in recorded and whole.tokenizer is not None:
        contract = ScoringContract.from_dict(recorded, str(source / artifacts.MANIFEST))
        whole = for_other_libraries(whole, contract)
        named = None if whole.adapter is None else whole.adapter["base_model_name_or_path"]
        readme = card(whole, contract, named)

    def write(target: Path) -> None:
        whole.save(target)
        if readme is not None:
            (target / "README.md").write_text(readme, encoding="utf-8")

    fill_directory(directory, write, f"the model {model}")
    kind = _kind(whole, head)
    if readme is not None:
        kind += "; README.md says how others score with it"
    left_out = _left_out(source, directory, loaded)
    return f"{kind}; left out: {', '.join(left_out)}" if left_out else kind


def _kind(written: Model, head: str) -> str:
    """Say what was written."""
    if written.adapter is None:
        return "a reward model" if head == "score" else "a language model"
    of = "a reward model's adapter" if head == "score" else "an adapter"
    return f"{of} of {written.adapter['base_model_name_or_path']}, for PEFT"


def _merged(model: Model) -> Model:
    """Merge adapters; on a quantized base into the values that they were trained with, in bfloat16, with a warning."""
    if model.quantized is None:
        return model.merged()
    warn(
        f"the adapters were trained on a base in {model.quantized}: what is written is the base as {model.quantized} "
        "rounds it, plus the adapters, in bfloat16. Rounding that sum changes outputs slightly; without --merge, the "
        "adapters are written for the original base, which they fit less exactly"
    )
    return model.merged().storing("bfloat16")


def _left_out(source: Path, written: Path, model: Model) -> list[str]:
    """List the source's files and tensors that were not written."""
    exported = {path.name for path in written.iterdir()}
    files = [path.name for path in sorted(source.iterdir()) if path.is_file() and path.name not in exported]
    names = [name for name in files if not name.endswith(WEIGHTS) and not name.startswith(".")]
    if not (_has_weights(source) and _has_weights(written)):
        return names
    # A tied head and a table computed from the config are redundant.
    redundant = ["rotary_emb.inv_freq"]
    if _tied(model):
        redundant.append("lm_head.weight")
    missing = sorted(set(open_weights(source)) - set(open_weights(written)))
    return names + [name for name in missing if not name.endswith(tuple(redundant))]


def _has_weights(directory: Path) -> bool:
    """Return whether a directory has a whole model's tensors, in one file or in shards."""
    return (directory / "model.safetensors").is_file() or (directory / INDEX).is_file()


def _tied(model: Model) -> bool:
    return bool(text_config(model.hf_config).get("tie_word_embeddings")) and model.definition.head == "lm"
