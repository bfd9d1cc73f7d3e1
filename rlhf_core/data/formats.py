"""File formats, and the hub, as datasets by name: entry points of rlhf-core."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core.data.records import load
from rlhf_core.data.table import Records


def _file_loader(kind: str) -> Callable[..., Records]:
    def load_file(*, path: str, split: str | None = None) -> Records:
        """Read the rows of one file."""
        return load({"name": kind, "path": path} | ({} if split is None else {"split": split}))

    return load_file


jsonl = _file_loader("jsonl")
json = _file_loader("json")
csv = _file_loader("csv")
parquet = _file_loader("parquet")
arrow = _file_loader("arrow")
array_record = _file_loader("array_record")
txt = _file_loader("txt")


def hub(*, path: str, subset: str | None = None, split: str = "train") -> Records:
    """Load a dataset of the Hugging Face hub; `path` is its name there."""
    return load({"name": path, "split": split} | ({} if subset is None else {"subset": subset}))
