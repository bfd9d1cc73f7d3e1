"""Token ids that come ready-made, and fingerprints of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Source
from rlhf_core.encoding import Ints
from rlhf_core.rows import Tree


def pretokenised(source: Source, column: str, tokenizer: Any, problems: Problems) -> list[Ints]:
    """int32 [n] for every row of a column of token ids, padding removed by the attention mask beside it.

    A column of prompt ids (`prompt_ids`, `prompt_input_ids`, `input_ids_prompt`) goes in front.
    Rows that are wrong are added to `problems` and come back empty.
    """
    side = "chosen" if "chosen" in column else "rejected"
    columns = source.columns
    mask = _first(columns, f"attention_mask_{side}", f"{side}_attention_mask", f"{side}_mask")
    before = prompt_ids(source, tokenizer, problems)
    own = _column(source, column, mask, tokenizer, problems)
    return own if before is None else [np.concatenate(parts) for parts in zip(before, own, strict=True)]


def prompt_ids(source: Source, tokenizer: Any, problems: Problems) -> list[Ints] | None:
    """As `pretokenised`, of the column of prompt ids; None without one."""
    columns = source.columns
    prompt = _first(columns, "prompt_ids", "prompt_input_ids", "input_ids_prompt")
    mask = _first(columns, "attention_mask_prompt", "prompt_attention_mask", "prompt_mask")
    return None if prompt is None else _column(source, prompt, mask, tokenizer, problems)


def _column(source: Source, column: str, mask: str | None, tokenizer: Any, problems: Problems) -> list[Ints]:
    vocabulary = len(tokenizer) if tokenizer is not None else None
    return [
        _ids(row, column, mask, vocabulary, source.where(i), problems) for i, row in enumerate(source.rows)
    ]


def _first(columns: Sequence[str], *names: str) -> str | None:
    return next((name for name in names if name in columns), None)


def _ids(
    row: Any, column: str, mask: str | None, vocabulary: int | None, place: str, problems: Problems
) -> Ints:
    ids = _integers(row, column, place, problems)
    if ids is None:
        return np.zeros(0, np.int32)
    if len(ids) and (ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary)):
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        known = "" if vocabulary is None else f" of the tokenizer (0 to {vocabulary - 1})"
        hint = "; mark padding in the attention mask" if bad < 0 else ""
        problems.add(f"{place}: '{column}' holds {bad}, which is no token{known}{hint}")
        return np.zeros(0, np.int32)
    if mask is not None:
        seen = _integers(row, mask, place, problems)
        if seen is None:
            return np.zeros(0, np.int32)
        if len(seen) != len(ids):
            problems.add(f"{place}: '{mask}' has {len(seen)} elements, '{column}' has {len(ids)}")
            return np.zeros(0, np.int32)
        ids = ids[seen != 0]
    return ids.astype(np.int32)


def _integers(row: Any, column: str, place: str, problems: Problems) -> NDArray[np.int64] | None:
    if row.get(column) is None:
        missing = "missing, which other rows of the file have"
        problems.add(f"{place}: '{column}' is {'null' if column in row else missing}")
        return None
    try:
        values = np.asarray(row[column])
    except ValueError:  # a list of lists of several lengths
        values = np.asarray(None)
    if values.size == 0 and values.ndim == 1:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iub":
        problems.add(f"{place}: '{column}' is not a list of integers")
        return None
    return values.astype(np.int64)


class Seen:
    """Finds rows of the same tokens as an earlier one, or that reverse one, and rows of words that have no token."""

    def __init__(self, report: Report, tokenizer: Any) -> None:
        self.report = report
        self.unknown = unknown_id(tokenizer)
        self.places: dict[tuple[bytes, ...], str] = {}

    def note(self, place: str, *sequences: Ints) -> None:
        """A row's ids: of one text, or of chosen and rejected."""
        key = tuple(hashlib.blake2b(ids.tobytes(), digest_size=16).digest() for ids in sequences)
        first = self.places.setdefault(key, place)
        if first != place:
            self.report.duplicates.append(place)
        elif key[::-1] != key and key[::-1] in self.places:
            self.report.reversed.append(place)
        if self.unknown is not None and any((ids == self.unknown).any() for ids in sequences):
            self.report.unknown.append(place)


def unknown_id(tokenizer: Any) -> int | None:
    """What stands for text that has no token; None where there is none, or where it means something else too."""
    found = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return None if found in others else found


def require_vocabulary(trees: Sequence[Tree], where: Callable[[int], str], size: int) -> None:
    """Raise InputError naming the rows with tokens that a model of `size` embeddings has none for.

    where: names a tree. Without this such a token would be read as the last one that there is.
    """
    problems = Problems()
    for i, tree in enumerate(trees):
        token = max(int(ids.max(initial=0)) for ids in (tree.prefix, *tree.branches))
        if token >= size:
            problems.add(
                f"{where(i)}: token {token} is none of the model's, which has 0 to {size - 1}: use the tokenizer "
                "that the model was trained with"
            )
    problems.stop()


def digest64(content: NDArray[Any] | bytes) -> int:
    """64 bits of a hash of an array's bytes, the same on every machine and in every version."""
    if not isinstance(content, bytes):
        array = np.ascontiguousarray(content)
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def combined(*columns: NDArray[Any]) -> NDArray[np.uint64]:
    """One digest per row of columns of 8 bytes each, [rows] or [rows, n]."""
    parts = [np.ascontiguousarray(column).reshape(len(column), -1).view(np.uint64) for column in columns]
    table = np.concatenate(parts, 1)
    return np.fromiter((digest64(row) for row in table), np.uint64, len(table))


def digest_ids(sequences: Sequence[NDArray[Any]], *more: NDArray[Any]) -> str:
    """sha256 of token sequences and of arrays beside them."""
    content = hashlib.sha256(np.array([len(ids) for ids in sequences], np.int64).tobytes())
    for array in (*sequences, *more):
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()
