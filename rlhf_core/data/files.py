"""Files to rows, each with its number in the file. Text files are gone through once, and their rows stay in them."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.arrow_files import arrow, parquet
from rlhf_core.data.column_kinds import Kinds
from rlhf_core.data.csv_files import csv_rows
from rlhf_core.data.lazy_rows import Content, spool
from rlhf_core.data.source import digest
from rlhf_core.data.text_files import Found, json_array, jsonl, txt
from rlhf_core.errors import InputError, reading

COMPRESSIONS = ("gz", "zst")


class Rows(NamedTuple):
    """The rows of a file."""

    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int] | NDArray[np.int64]
    """1-based line (jsonl, csv, txt) or row of each."""
    kinds: Kinds
    fingerprint: str
    """Of the content, uncompressed."""


def format_of(path: Path) -> str | None:
    """The format that a file's ending says, without that of its compression; None for any other."""
    suffixes = [suffix.lstrip(".").lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def read(path: Path, name: str, kind: str) -> Rows:
    """Rows of a file. `name` is what messages call it; `kind` one of `FORMATS`.

    Raises InputError for what cannot be read, naming the rows, and for a file without rows.
    """
    with reading(name):
        content = Content(name, _opened(path))
    if not content.size or (content.size < 1000 and not content.read(0, 1000).strip()):
        raise InputError(f"{name} is empty")
    with reading(name):
        rows, numbers, kinds = FORMATS[kind](content)
    if not len(rows):
        raise InputError(f"{name} has no rows")
    return Rows(rows, numbers, kinds, digest(kind, content.sha256))


def _opened(path: Path) -> BinaryIO:
    ending = path.suffix.lstrip(".").lower()
    if ending == "gz":
        with gzip.open(path) as packed:
            return spool(lambda file: shutil.copyfileobj(packed, file, 1 << 20))
    if ending == "zst":
        import pyarrow as pa

        with pa.CompressedInputStream(str(path), "zstd") as stream:
            return spool(lambda file: shutil.copyfileobj(stream, file, 1 << 20))
    return cast(BinaryIO, open(path, "rb"))


FORMATS: dict[str, Callable[[Content], Found]] = {
    "jsonl": jsonl,
    "json": json_array,
    "csv": csv_rows,
    "parquet": parquet,
    "arrow": arrow,
    "txt": txt,
}
