"""Where a model is: a directory, an adapter's base beside it, or the files of a hub name."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.errors import InputError, suggest
from rlhf_core.models import peft
from rlhf_core.models.model import TOKENIZER_FILES


def model_places(
    path: str | Path, adapter: str | Path | None, revision: str | None = None
) -> tuple[Path, Path | None, peft.Base]:
    """Find the directories of the model and of its adapter, if any, and what the adapter calls the model."""
    if revision is not None and Path(path).expanduser().is_dir():
        raise InputError(
            f"{path} is a directory: revision {revision!r} is for names of the hub; leave it out"
        )
    directory = local_directory(path, revision)
    if adapter is not None:
        return directory, local_directory(adapter), peft.Base(peft.fixed_name(path), revision)
    if (directory / peft.CONFIG).is_file() and not (directory / "config.json").is_file():
        base = peft.base_of(directory)
        return local_directory(base.named, base.revision), directory, base
    return directory, None, peft.Base(peft.fixed_name(path), revision)


def local_directory(path: str | Path, revision: str | None = None) -> Path:
    """The directory of a model: the one that is named, or that of the files which the hub gives for a name.

    Raises InputError where there is neither.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise InputError(f"{path} is a file; give the directory that holds config.json and the weights")
    named = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) is not None
    if not named or directory.parent.is_dir():
        beside = sorted(p.name for p in directory.parent.glob("*/")) if directory.parent.is_dir() else []
        raise InputError(
            f"{path}: no such directory; give a directory in Hugging Face layout, or a hub name OWNER/NAME."
            f"{suggest(directory.name, beside)}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [
        "*.safetensors",
        "*.safetensors.index.json",
        "config.json",
        "generation_config.json",
        "rlhf_artifact.json",
        peft.CONFIG,
        *TOKENIZER_FILES,
    ]
    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{path}: no such directory, and the hub did not give it: {reason}. Where there is no network, fetch it on "
            f"another machine (hf download {path}) and give its directory; a gated model needs hf auth login"
        ) from None
