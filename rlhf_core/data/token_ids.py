"""Token ids that come ready-made, and fingerprints of token ids."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.ragged_arrays import Ragged
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Places, Source
from rlhf_core.packing.rows import Tree, shared_prefix
from rlhf_core.packing.trees import Trees
from rlhf_core.tokenizer.encoding import Ints


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


def facts(
    arrays: Mapping[str, NDArray[Any]], names: Sequence[str], unknown: int | None
) -> dict[str, NDArray[Any]]:
    """What is asked of the sequences NAME of every row later, so that nobody has to go through the tokens again.

    NAME_digest: uint64 [rows]. unknown: bool [rows], whether one of them has the unknown token. Of two names, `shared`:
    int32 [rows], the tokens that both begin with, less than either has.
    """
    found: dict[str, NDArray[Any]] = {}
    ends = {name: arrays[f"{name}_ends"] for name in names}
    has_unknown = np.zeros(len(ends[names[0]]), bool)
    for name in names:
        flat, stops = arrays[name], ends[name].tolist()
        found[f"{name}_digest"] = np.fromiter(
            (digest64(flat[start:stop]) for start, stop in itertools.pairwise([0, *stops])),
            np.uint64,
            len(stops),
        )
        if unknown is not None:
            has_unknown[np.searchsorted(ends[name], np.flatnonzero(flat == unknown), side="right")] = True
    found["unknown"] = has_unknown
    if len(names) == 2:
        pairs = zip(*(itertools.pairwise([0, *ends[name].tolist()]) for name in names), strict=True)
        one, other = (arrays[name] for name in names)
        found["shared"] = np.array([shared_start(one[a:b], other[c:d]) for (a, b), (c, d) in pairs], np.int32)
    return found


def shared_start(one: Ints, other: Ints) -> int:
    """Tokens that both begin with, less than either has; 0 where one has none."""
    return shared_prefix((one, other)) if len(one) and len(other) else 0


def note_repeats(report: Report, digests: NDArray[np.uint64], rows: Places) -> None:
    """Tell of rows of the same tokens as an earlier one, or of a pair reversed.

    digests: [rows, sides], of the sequences of rows that are kept. The same row drawn again, as by a weight, is none.
    """
    if not len(digests):
        return
    key = _mixed(digests)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    same_row = rows.identities()
    again = same_row[first[which]] != same_row
    report.duplicates += [rows[i] for i in np.flatnonzero(again).tolist()]
    if digests.shape[1] < 2:
        return
    back = _mixed(digests[:, ::-1])
    at = np.minimum(np.searchsorted(key[first], back), len(first) - 1)
    earlier = (key[first][at] == back) & (first[at] < np.arange(len(key))) & (back != key) & ~again
    report.reversed += [rows[i] for i in np.flatnonzero(earlier).tolist()]


def _mixed(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One number per row; the order of the columns counts."""
    mixed = np.zeros(len(digests), np.uint64)
    for column in digests.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def unknown_id(tokenizer: Any) -> int | None:
    """What stands for text that has no token; None where there is none, or where it means something else too."""
    found = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return None if found in others else found


def require_vocabulary(trees: Sequence[Tree] | Ragged, where: Callable[[int], str], size: int) -> None:
    """Raise InputError naming the rows with tokens that a model of `size` embeddings has none for.

    trees: or sequences. where: names one. Without this such a token would be read as the last one that there is.
    """
    if isinstance(trees, Trees | Ragged) and trees.largest() < size:
        return
    problems = Problems()
    for i, each in enumerate(trees):
        parts: Any = (each.prefix, *each.branches) if isinstance(each, Tree) else (each,)
        token = max(int(ids.max(initial=0)) for ids in parts)
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


def fingerprint_of(digests: NDArray[np.uint64]) -> str:
    """Of all rows, in order, from one digest of each."""
    return hashlib.sha256(digests.astype("<u8").tobytes()).hexdigest()


def combined(*columns: NDArray[Any]) -> NDArray[np.uint64]:
    """One digest per row of columns of 8 bytes each, [rows] or [rows, n]."""
    parts = [np.ascontiguousarray(column).reshape(len(column), -1).view(np.uint64) for column in columns]
    table = np.concatenate(parts, 1)
    return np.fromiter((digest64(row) for row in table), np.uint64, len(table))
