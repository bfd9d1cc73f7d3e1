"""Token ids on the disk, so that the same rows are tokenised once: flat arrays that are mapped into memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core import artifacts, runtime
from rlhf_core.data.report import Problems, RowProblems
from rlhf_core.data.source import Source, digest
from rlhf_core.data.token_ids import unknown_id
from rlhf_core.tokenizer import tokenizer_hash
from rlhf_core.tokenizer.chat_template import templates_of, writes_date
from rlhf_core.tokenizer.encoding import Encoder

Arrays: TypeAlias = dict[str, NDArray[Any]]
SMALL = 1000
"""Fewer rows are not worth a file."""
MANIFEST = "manifest.json"
FORMAT = 2
ENDS, ROWS = "_ends", "_rows"
"""How the names of arrays end that hold where sequences end, and numbers of rows: these count on from part to part."""


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

    def of(self, source: Source, encode: Callable[[Source], Arrays]) -> Arrays:
        """`encode` of all parts of the source, one after another; or the same arrays from the disk, read-only.

        Raises InputError with the problems of all rows.
        """

        def build() -> Iterator[Arrays]:
            problems = Problems()
            for part in source.parts():
                try:
                    encoded = encode(part)
                except RowProblems as error:
                    problems.take(error)
                    continue
                if not problems.count:
                    yield encoded
            problems.stop()

        if self.encoder is None or len(source.rows) < SMALL or self._way is None:
            return joined(build())
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
            unknown_id(tokenizer),
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
            code(),
        ]
        return digest(json.dumps(settings, sort_keys=True, default=repr))


def code() -> str:
    """Of the modules that turn rows into ids: a change of the rules never meets tokens of the old ones."""
    here = Path(__file__).parent
    content = hashlib.sha256()
    beside = ("encoding.py", "templates.py", "template_dates.py", "text_options.py", "special_ids.py")
    for path in (*(here.parent / name for name in beside), *sorted(here.glob("*.py"))):
        content.update(path.read_bytes())
    return content.hexdigest()


def cached(key: str, build: Callable[[], Iterable[Arrays]]) -> Arrays:
    """The arrays kept under `key`, mapped read-only, or the parts that `build()` gives, which are kept from then on.

    What is damaged is built anew. Any number of processes may ask for one key at once: each sees all or nothing.
    """
    directory = cache_directory() / key
    found = _open(directory)
    if found is not None:
        return found
    try:
        return _store(directory, build)
    except OSError as error:
        warnings.warn(
            f"tokens are not kept in {directory.parent}: {error.strerror or error}; RLHF_CACHE names another "
            "directory",
            stacklevel=2,
        )
    return joined(build())


def _open(directory: Path) -> Arrays | None:
    try:
        said = json.loads((directory / MANIFEST).read_bytes())
        if said["format"] != FORMAT or artifacts.find_damage(directory, said["files"]):
            return None
        loaded = {
            name: np.load(directory / name, mmap_mode="r", allow_pickle=False) for name in said["files"]
        }
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not as it was written
        return None
    # Without numpy's own class for mapped arrays, every slice of which costs several times as much.
    return {name.removesuffix(".npy"): array.view(np.ndarray) for name, array in loaded.items()}


def _store(directory: Path, build: Callable[[], Iterable[Arrays]]) -> Arrays:
    """Write the parts one after another, so that no more than one of them is in memory."""
    parts = counted_on(build())
    first = next(parts, {})  # nothing is written where the rows are wrong
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    damaged = beside.with_suffix(".damaged")
    growing: dict[str, _Growing] = {}
    try:
        for part in itertools.chain([first], parts):
            for name, array in part.items():
                if name not in growing:
                    growing[name] = _Growing(beside / f"{name}.npy", array)
                growing[name].add(array)
        for file in growing.values():
            file.close()
        manifest = {"format": FORMAT, "files": artifacts.describe_files(beside)}
        (beside / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        if directory.exists() and _open(directory) is None:
            with suppress(OSError):  # another process may have done so
                os.rename(directory, damaged)
        with suppress(OSError):  # another process was first
            os.rename(beside, directory)
        found = _open(directory)
        if found is None:
            raise OSError("what was written cannot be read again")
        return found
    finally:
        for file in growing.values():
            file.close()
        for leftover in (beside, damaged):
            shutil.rmtree(leftover, ignore_errors=True)


class _Growing:
    """A file of one array that gets longer; its head, which says how long it is, is written anew at the end."""

    def __init__(self, path: Path, like: NDArray[Any]) -> None:
        self._file: BinaryIO | None = open(path, "w+b")  # noqa: SIM115  (it stays open until `close`)
        self._dtype, self._shape, self._length = like.dtype, like.shape[1:], 0
        self._start = self._head()

    def _head(self) -> int:
        assert self._file is not None
        self._file.seek(0)
        shape = (self._length, *self._shape)
        np.lib.format.write_array_header_1_0(
            self._file,
            {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape},
        )
        return self._file.tell()

    def add(self, array: NDArray[Any]) -> None:
        assert self._file is not None
        array.astype(self._dtype, copy=False).tofile(self._file)
        self._length += len(array)

    def close(self) -> None:
        if self._file is None:
            return
        file = self._file
        try:
            if self._head() != self._start:
                raise OSError("the head of an array has changed its size")
        finally:
            self._file = None
            file.close()


def counted_on(parts: Iterable[Arrays]) -> Iterator[Arrays]:
    """The parts with ends of sequences and numbers of rows as they are in all of them together.

    Every part has an array with one element per row, which tells how many rows it has: its ends of sequences.
    """
    before: dict[str, int] = {}
    rows = 0
    for part in parts:
        counted = {}
        for name, array in part.items():
            if name.endswith(ENDS):
                array = array + before.get(name, 0)
                before[name] = int(array[-1]) if len(array) else before.get(name, 0)
            elif name.endswith(ROWS):
                array = array + rows
            counted[name] = array
        rows += next((len(array) for name, array in part.items() if name.endswith(ENDS)), 0)
        yield counted


def joined(parts: Iterable[Arrays]) -> Arrays:
    """All parts as one, in memory."""
    every: dict[str, list[NDArray[Any]]] = {}
    for part in counted_on(parts):
        for name, array in part.items():
            every.setdefault(name, []).append(array)
    return {
        name: every[name][0] if len(every[name]) == 1 else np.concatenate(every.pop(name))
        for name in list(every)
    }


def flat(name: str, sequences: Sequence[NDArray[Any] | None], dtype: Any = np.int32) -> Arrays:
    """{name: all sequences in a row, name_ends: int64 [n], where each ends}; None is a sequence without elements."""
    there = [sequence if sequence is not None else np.zeros(0, dtype) for sequence in sequences]
    ends = np.cumsum([len(sequence) for sequence in there], dtype=np.int64)
    return {name: np.concatenate([np.zeros(0, dtype), *there]), f"{name}{ENDS}": ends}
