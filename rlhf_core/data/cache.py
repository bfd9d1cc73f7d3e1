"""Cache token ids on disk as memory-mapped flat arrays, so that the same rows are tokenised once."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from datetime import date
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_core import artifacts, runtime
from rlhf_core.data.report import Problems, RowProblems
from rlhf_core.data.table import Table, digest
from rlhf_core.errors import UNREADABLE, read_limited, warn
from rlhf_core.tokenizer import tokenizer_hash
from rlhf_core.tokenizer.chat_template import templates_of, writes_date
from rlhf_core.tokenizer.encoding import Encoder

Arrays: TypeAlias = dict[str, NDArray[Any]]
SMALL = 1000
"""Sources with fewer rows are not cached."""
MANIFEST = "manifest.json"
FORMAT = 4
ENDS = "_ends"
"""Suffix of arrays with sequence ends, which `renumber` makes continue from part to part."""


def cache_directory() -> Path:
    """Return `$RLHF_CACHE/tokens`, by default next to the compiled programs. It may be deleted at any time."""
    return runtime.cache_root() / "tokens"


class TokenCache:
    """Encode tables with one set of settings, reading cached arrays if there are any."""

    def __init__(self, kind: str, encoder: Encoder | None, numbers: Sequence[str] = ()) -> None:
        """kind: "pairs", "completions", "texts" or "prompts". encoder: None disables the cache.

        numbers: columns of numbers, which are cached too.
        """
        self.kind = kind
        self.encoder = encoder
        self.numbers = numbers

    def encode(self, table: Table, encode: Callable[[Table], Arrays]) -> Arrays:
        """Apply `encode` to the table part by part, or read the same arrays from disk, read-only.

        Raises InputError with the problems of all rows.
        """

        def build() -> Iterator[Arrays]:
            problems = Problems()
            for part in table.parts():
                try:
                    encoded = encode(part)
                except RowProblems as error:
                    problems.merge(error)
                    continue
                if not problems.count:
                    yield encoded
            problems.raise_if_any()

        cached = table.fingerprint and len(table.rows) >= SMALL
        if self.encoder is None or not cached or self._settings_hash is None:
            return join_parts(build())
        return load_or_build(f"{self.kind}-{digest(table.fingerprint, self._settings_hash)[:40]}", build)

    @cached_property
    def _settings_hash(self) -> str | None:
        """Hash everything but the rows that affects token ids; None if the tokenizer cannot be hashed."""
        assert self.encoder is not None
        tokenizer, options = self.encoder.tokenizer, self.encoder.options
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return None  # `tokenizer_hash` would cover its vocabulary alone
        dated = writes_date(tokenizer, options.chat_template)
        settings = [
            self.kind,
            list(self.numbers),
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
            options.system_prompt,
            (options.template_date or date.today().isoformat()) if dated else None,
            [version(name) for name in ("tokenizers", "transformers", "jinja2")],
            code_hash(),
        ]
        return digest(json.dumps(settings, sort_keys=True, default=repr))


def code_hash() -> str:
    """Hash the modules that turn rows into token ids, so that ids made by older rules are never read again."""
    content = hashlib.sha256()
    rooms = Path(__file__).parent.parent
    for path in (*sorted(rooms.glob("tokenizer/*.py")), *sorted(rooms.glob("data/*.py"))):
        content.update(path.read_bytes())
    return content.hexdigest()


def load_or_build(key: str, build: Callable[[], Iterable[Arrays]]) -> Arrays:
    """Map the arrays cached under `key` read-only, or build them and cache them.

    Damaged entries are rebuilt. Several processes may ask for the same key: each sees a complete entry or none.
    """
    directory = cache_directory() / key
    arrays = _load(directory)
    if arrays is not None:
        return arrays
    try:
        return _store(directory, build)
    except OSError as error:
        warn(
            f"tokens are not cached in {directory.parent}: {error.strerror or error}; set RLHF_CACHE to another "
            "directory"
        )
    return join_parts(build())


def _load(directory: Path) -> Arrays | None:
    try:
        manifest = json.loads(read_limited(directory / MANIFEST))
        if manifest["format"] != FORMAT or manifest["key"] != directory.name:
            return None
        if artifacts.find_damage(directory, manifest["files"]):
            return None
        return {name: _map(directory / name, *kind) for name, kind in manifest["arrays"].items()}
    except UNREADABLE:  # missing or damaged
        return None


def _map(path: Path, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Map a file of elements read-only. shape: of one row."""
    if not path.stat().st_size:  # which cannot be mapped
        return np.zeros((0, *shape), dtype)
    # Slicing np.memmap costs several times as much as slicing np.ndarray.
    return np.memmap(path, dtype, "r").reshape(-1, *shape).view(np.ndarray)


def _store(directory: Path, build: Callable[[], Iterable[Arrays]]) -> Arrays:
    """Write the parts one after another, with at most one in memory, and map the result."""
    parts = renumber(build())
    first = next(parts, {})  # raises before anything is written if the rows are wrong
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    damaged = temporary.with_suffix(".damaged")
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(temporary / name, "wb")) for name in first}
            for part in itertools.chain([first], parts):
                for name, array in part.items():
                    array.astype(first[name].dtype, copy=False).tofile(files[name])
        kinds = {name: (array.dtype.str, array.shape[1:]) for name, array in first.items()}
        manifest = {"format": FORMAT, "key": directory.name, "arrays": kinds}
        manifest["files"] = artifacts.describe_files(temporary)
        (temporary / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        if directory.exists() and _load(directory) is None:
            with suppress(OSError):  # another process may have moved it
                os.rename(directory, damaged)
        with suppress(OSError):  # another process was first
            os.rename(temporary, directory)
        arrays = _load(directory)
        if arrays is None:
            raise OSError("the arrays just written cannot be read back")
        return arrays
    finally:
        for leftover in (temporary, damaged):
            shutil.rmtree(leftover, ignore_errors=True)


def renumber(parts: Iterable[Arrays]) -> Iterator[Arrays]:
    """Shift the sequence ends of each part to count from the start of the first part."""
    offsets: dict[str, int] = {}
    for part in parts:
        renumbered = {}
        for name, array in part.items():
            if name.endswith(ENDS):
                array = array + offsets.get(name, 0)
                offsets[name] = int(array[-1]) if len(array) else offsets.get(name, 0)
            renumbered[name] = array
        yield renumbered


def join_parts(parts: Iterable[Arrays]) -> Arrays:
    """Concatenate all parts in memory."""
    arrays: dict[str, list[NDArray[Any]]] = {}
    for part in renumber(parts):
        for name, array in part.items():
            arrays.setdefault(name, []).append(array)
    return {
        name: arrays[name][0] if len(arrays[name]) == 1 else np.concatenate(arrays.pop(name))
        for name in list(arrays)
    }


def flatten(name: str, sequences: Sequence[NDArray[Any] | None], dtype: Any = np.int32) -> Arrays:
    """Concatenate sequences as {name: all of them, name_ends: int64 [n], where each ends}; None counts as empty."""
    filled = [sequence if sequence is not None else np.zeros(0, dtype) for sequence in sequences]
    ends = np.cumsum([len(sequence) for sequence in filled], dtype=np.int64)
    return {name: np.concatenate([np.zeros(0, dtype), *filled]), f"{name}{ENDS}": ends}


class Ragged(Sequence[NDArray[Any]]):
    """Sequences of different lengths: slices of a few flat arrays, which may be memory-mapped."""

    def __init__(
        self,
        flats: Sequence[NDArray[Any]],
        which: NDArray[np.int32],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        """which, starts, stops: [n], the index of each sequence's flat array and its bounds there."""
        self.flats = list(flats)
        self.which = which
        self.starts = starts
        self.stops = stops

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice | np.ndarray):
            return Ragged(self.flats, self.which[i], self.starts[i], self.stops[i])
        return self.flats[self.which[i]][self.starts[i] : self.stops[i]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.stops - self.starts

    def counts(self) -> NDArray[np.int64]:
        """Count the nonzero elements of each sequence after its first, int64 [n]."""
        found = np.zeros(len(self), np.int64)
        for number, flat in enumerate(self.flats):
            before = np.concatenate([[0], np.cumsum(flat != 0)])
            mine = self.which == number
            starts, stops = self.starts[mine], self.stops[mine]
            found[mine] = before[stops] - before[np.minimum(starts + 1, stops)]
        return found

    def largest(self) -> int:
        """Return the largest element of the flat arrays, an upper bound for the sequences."""
        return max((int(flat.max(initial=0)) for flat in self.flats), default=0)


def unknown_id(tokenizer: Any) -> int | None:
    """Return the id of the unknown token; None if there is none, or if it is also BOS, EOS or padding."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return None if unknown in others else unknown


def digest64(content: NDArray[Any] | bytes) -> int:
    """Hash an array's bytes to 64 bits, the same on every machine and in every version."""
    if not isinstance(content, bytes):
        array = np.ascontiguousarray(content)
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def combine_digests(*columns: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash columns of 8-byte elements, [rows] or [rows, n], to one digest per row, uint64 [rows]."""
    parts = [np.ascontiguousarray(column).reshape(len(column), -1).view(np.uint64) for column in columns]
    table = np.concatenate(parts, 1)
    return np.fromiter((digest64(row) for row in table), np.uint64, len(table))
