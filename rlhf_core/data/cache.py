"""Token ids on the disk, so that the same rows are tokenised once: flat arrays that are mapped into memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core import artifacts, runtime
from rlhf_core.data.source import Source, digest
from rlhf_core.encoding import Encoder
from rlhf_core.templates import templates_of, writes_date
from rlhf_core.tokenizer import tokenizer_hash

Arrays: TypeAlias = dict[str, NDArray[Any]]
SMALL = 1000
"""Fewer rows are not worth a file."""
MANIFEST = "manifest.json"
FORMAT = 1


def cache_directory() -> Path:
    """`$RLHF_CACHE/tokens`; without that variable, beside the compiled programs of the user. It may be deleted."""
    root = os.environ.get("RLHF_CACHE")
    return (Path(root).expanduser() if root else runtime.cache_directory().parent) / "tokens"


class Tokens:
    """What one way of encoding makes of sources, from the cache where it is there."""

    def __init__(self, kind: str, encoder: Encoder | None) -> None:
        """kind: "pairs", "texts" or "prompts"; encoder: None keeps nothing."""
        self.kind = kind
        self.encoder = encoder

    def of(self, source: Source, build: Callable[[], Arrays]) -> Arrays:
        """`build()`, or the same arrays from the disk, read-only."""
        if self.encoder is None or len(source.rows) < SMALL or self._way is None:
            return build()
        return cached(f"{self.kind}-{digest(source.fingerprint, self._way)[:40]}", build)

    @cached_property
    def _way(self) -> str | None:
        """Of all but the rows that decides the ids; None where that cannot be told."""
        assert self.encoder is not None
        tokenizer, options = self.encoder.tokenizer, self.encoder.options
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return None  # the hash of such a tokenizer is of its vocabulary alone
        dated = writes_date(tokenizer, options.chat_template)
        settings = [
            self.kind,
            tokenizer_hash(tokenizer),
            type(tokenizer).__qualname__,
            getattr(tokenizer, "split_special_tokens", False),
            self.encoder.special,
            self.encoder.template,
            templates_of(tokenizer) if options.chat_template is None else None,
            options.chat_template_kwargs,
            options.read_at,
            options.prompt_repeated,
            (options.template_date or date.today().isoformat()) if dated else None,
            [version(name) for name in ("tokenizers", "transformers", "jinja2")],
            _code(),
        ]
        return digest(json.dumps(settings, sort_keys=True, default=repr))


def _code() -> str:
    """Of the modules that turn rows into ids: a change of the rules never meets tokens of the old ones."""
    here = Path(__file__).parent
    content = hashlib.sha256()
    beside = ("encoding.py", "templates.py", "template_dates.py", "text_options.py", "special_ids.py")
    for path in (*(here.parent / name for name in beside), *sorted(here.glob("*.py"))):
        content.update(path.read_bytes())
    return content.hexdigest()


def cached(key: str, build: Callable[[], Arrays]) -> Arrays:
    """The arrays kept under `key`, mapped read-only, or those of `build()`, which are kept from then on.

    What is damaged is built anew. Any number of processes may ask for one key at once: each sees all or nothing.
    """
    directory = cache_directory() / key
    found = _open(directory)
    if found is not None:
        return found
    arrays = build()
    try:
        _store(directory, arrays)
    except OSError as error:
        warnings.warn(
            f"tokens are not kept in {directory.parent}: {error.strerror or error}; RLHF_CACHE names another "
            "directory",
            stacklevel=2,
        )
    return arrays


def _open(directory: Path) -> Arrays | None:
    try:
        said = json.loads((directory / MANIFEST).read_bytes())
        if said["format"] != FORMAT or artifacts.damage(directory, said["files"]):
            return None
        loaded = {
            name: np.load(directory / name, mmap_mode="r", allow_pickle=False) for name in said["files"]
        }
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not as it was written
        return None
    # Without numpy's own class for mapped arrays, every slice of which costs several times as much.
    return {name.removesuffix(".npy"): array.view(np.ndarray) for name, array in loaded.items()}


def _store(directory: Path, arrays: Arrays) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    damaged = beside.with_suffix(".damaged")
    try:
        for name, array in arrays.items():
            np.save(beside / f"{name}.npy", array, allow_pickle=False)
        manifest = {"format": FORMAT, "files": artifacts.describe(beside)}
        (beside / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        if directory.exists() and _open(directory) is None:
            with suppress(OSError):  # another process may have done so
                os.rename(directory, damaged)
        os.rename(beside, directory)
    except OSError:
        if _open(directory) is None:  # else another process was first
            raise
    finally:
        for leftover in (beside, damaged):
            shutil.rmtree(leftover, ignore_errors=True)


def flat(name: str, sequences: Sequence[NDArray[Any] | None], dtype: Any = np.int32) -> Arrays:
    """{name: all sequences in a row, name_ends: int64 [n], where each ends}; None is a sequence without elements."""
    there = [sequence if sequence is not None else np.zeros(0, dtype) for sequence in sequences]
    ends = np.cumsum([len(sequence) for sequence in there], dtype=np.int64)
    return {name: np.concatenate([np.zeros(0, dtype), *there]), f"{name}_ends": ends}


def ragged(arrays: Arrays, name: str) -> list[NDArray[Any]]:
    """The sequences that `flat` put in a row, as views."""
    whole = arrays[name]
    return [whole[start:end] for start, end in itertools.pairwise([0, *arrays[f"{name}_ends"].tolist()])]
