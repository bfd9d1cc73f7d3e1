"""Read data files of every supported format, with the number of each row in its file."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.arrow_files import read_arrow, read_parquet
from rlhf_core.data.column_kinds import Kinds
from rlhf_core.data.csv_files import read_csv
from rlhf_core.data.lazy_rows import Content, spool
from rlhf_core.data.source import digest
from rlhf_core.data.text_files import ParsedFile, read_json_array, read_jsonl, read_txt
from rlhf_core.errors import InputError, reading

COMPRESSIONS = ("gz", "zst")


class Rows(NamedTuple):
    """The rows of a file."""

    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int] | NDArray[np.int64]
    """1-based line (jsonl, csv, txt) or row number of each row."""
    kinds: Kinds
    fingerprint: str
    """Hash of the uncompressed content."""


def format_of(path: Path) -> str | None:
    """Tell a file's format from its suffix, ignoring .gz and .zst; None if it is unknown."""
    suffixes = [suffix.lstrip(".").lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def read_file(path: Path, name: str, kind: str) -> Rows:
    """Read the rows of a file. name: what messages call it. kind: one of `FORMATS`.

    Raises InputError naming unreadable rows, and for a file without rows.
    """
    with reading(name):
        content = Content(name, _open(path))
    if not content.size or (content.size < 1000 and not content.read(0, 1000).strip()):
        raise InputError(f"{name} is empty")
    with reading(name):
        rows, numbers, kinds = FORMATS[kind](content)
    if not len(rows):
        raise InputError(f"{name} has no rows")
    return Rows(rows, numbers, kinds, digest(kind, content.sha256))


def _open(path: Path) -> BinaryIO:
    ending = path.suffix.lstrip(".").lower()
    if ending == "gz":
        with gzip.open(path) as packed:
            return spool(lambda file: shutil.copyfileobj(packed, file, 1 << 20))
    if ending == "zst":
        import pyarrow as pa

        with pa.CompressedInputStream(str(path), "zstd") as stream:
            return spool(lambda file: shutil.copyfileobj(stream, file, 1 << 20))
    return cast(BinaryIO, open(path, "rb"))


FORMATS: dict[str, Callable[[Content], ParsedFile]] = {
    "jsonl": read_jsonl,
    "json": read_json_array,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "txt": read_txt,
}
