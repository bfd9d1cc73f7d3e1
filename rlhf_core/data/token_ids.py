"""Read columns of token ids, and compute digests and other facts of token sequences."""

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


def read_token_ids(source: Source, column: str, tokenizer: Any, problems: Problems) -> list[Ints]:
    """Read a column of token ids as int32 [n] per row, without the padding that its attention mask marks.

    Prompt ids (`prompt_ids`, `prompt_input_ids`, `input_ids_prompt`) are put in front.
    Invalid rows are added to `problems` and returned empty.
    """
    side = "chosen" if "chosen" in column else "rejected"
    columns = source.columns
    mask = _first_present(columns, f"attention_mask_{side}", f"{side}_attention_mask", f"{side}_mask")
    prompts = read_prompt_ids(source, tokenizer, problems)
    ids = _read_column(source, column, mask, tokenizer, problems)
    return ids if prompts is None else [np.concatenate(parts) for parts in zip(prompts, ids, strict=True)]


def read_prompt_ids(source: Source, tokenizer: Any, problems: Problems) -> list[Ints] | None:
    """Read the column of prompt ids as `read_token_ids` does; None if there is none."""
    columns = source.columns
    prompt = _first_present(columns, "prompt_ids", "prompt_input_ids", "input_ids_prompt")
    mask = _first_present(columns, "attention_mask_prompt", "prompt_attention_mask", "prompt_mask")
    return None if prompt is None else _read_column(source, prompt, mask, tokenizer, problems)


def _read_column(
    source: Source, column: str, mask: str | None, tokenizer: Any, problems: Problems
) -> list[Ints]:
    vocabulary = len(tokenizer) if tokenizer is not None else None
    return [
        _read_ids(row, column, mask, vocabulary, source.where(i), problems)
        for i, row in enumerate(source.rows)
    ]


def _first_present(columns: Sequence[str], *names: str) -> str | None:
    return next((name for name in names if name in columns), None)


def _read_ids(
    row: Any, column: str, mask: str | None, vocabulary: int | None, place: str, problems: Problems
) -> Ints:
    ids = _read_integers(row, column, place, problems)
    if ids is None:
        return np.zeros(0, np.int32)
    if len(ids) and (ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary)):
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        known = "" if vocabulary is None else f" of the tokenizer (0 to {vocabulary - 1})"
        hint = "; mark padding in the attention mask" if bad < 0 else ""
        problems.add(f"{place}: '{column}' holds {bad}, which is no token{known}{hint}")
        return np.zeros(0, np.int32)
    if mask is not None:
        seen = _read_integers(row, mask, place, problems)
        if seen is None:
            return np.zeros(0, np.int32)
        if len(seen) != len(ids):
            problems.add(f"{place}: '{mask}' has {len(seen)} elements, '{column}' has {len(ids)}")
            return np.zeros(0, np.int32)
        ids = ids[seen != 0]
    return ids.astype(np.int32)


def _read_integers(row: Any, column: str, place: str, problems: Problems) -> NDArray[np.int64] | None:
    if row.get(column) is None:
        missing = "missing, which other rows of the file have"
        problems.add(f"{place}: '{column}' is {'null' if column in row else missing}")
        return None
    try:
        values = np.asarray(row[column])
    except ValueError:  # lists of different lengths
        values = np.asarray(None)
    if values.size == 0 and values.ndim == 1:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iub":
        problems.add(f"{place}: '{column}' is not a list of integers")
        return None
    return values.astype(np.int64)


def sequence_facts(
    arrays: Mapping[str, NDArray[Any]], names: Sequence[str], unknown: int | None
) -> dict[str, NDArray[Any]]:
    """Compute facts of every row's sequences, so that later steps need not read the tokens again.

    Returns NAME_digest, uint64 [rows]; unknown, bool [rows], whether a sequence has the unknown token; and for two
    names shared, int32 [rows], the length of `shared_start`.
    """
    facts: dict[str, NDArray[Any]] = {}
    ends = {name: arrays[f"{name}_ends"] for name in names}
    has_unknown = np.zeros(len(ends[names[0]]), bool)
    for name in names:
        flat, stops = arrays[name], ends[name].tolist()
        facts[f"{name}_digest"] = np.fromiter(
            (digest64(flat[start:stop]) for start, stop in itertools.pairwise([0, *stops])),
            np.uint64,
            len(stops),
        )
        if unknown is not None:
            has_unknown[np.searchsorted(ends[name], np.flatnonzero(flat == unknown), side="right")] = True
    facts["unknown"] = has_unknown
    if len(names) == 2:
        pairs = zip(*(itertools.pairwise([0, *ends[name].tolist()]) for name in names), strict=True)
        one, other = (arrays[name] for name in names)
        facts["shared"] = np.array([shared_start(one[a:b], other[c:d]) for (a, b), (c, d) in pairs], np.int32)
    return facts


def shared_start(one: Ints, other: Ints) -> int:
    """Return the length of the common token prefix, shorter than either sequence; 0 if one is empty."""
    return shared_prefix((one, other)) if len(one) and len(other) else 0


def record_repeats(report: Report, digests: NDArray[np.uint64], rows: Places) -> None:
    """Report rows that repeat an earlier row's tokens, or reverse an earlier pair.

    digests: [rows, sides], of the sequences of kept rows. A row repeated by `weight` does not count.
    """
    if not len(digests):
        return
    key = _mix(digests)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    same_row = rows.identities()
    again = same_row[first[which]] != same_row
    report.duplicates += [rows[i] for i in np.flatnonzero(again).tolist()]
    if digests.shape[1] < 2:
        return
    back = _mix(digests[:, ::-1])
    at = np.minimum(np.searchsorted(key[first], back), len(first) - 1)
    earlier = (key[first][at] == back) & (first[at] < np.arange(len(key))) & (back != key) & ~again
    report.reversed += [rows[i] for i in np.flatnonzero(earlier).tolist()]


def _mix(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each row's digests to one number that depends on their order."""
    mixed = np.zeros(len(digests), np.uint64)
    for column in digests.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


def unknown_id(tokenizer: Any) -> int | None:
    """Return the id of the unknown token; None if there is none, or if it is also BOS, EOS or padding."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    return None if unknown in others else unknown


def require_vocabulary(trees: Sequence[Tree] | Ragged, where: Callable[[int], str], size: int) -> None:
    """Raise InputError naming the rows with token ids that a model with `size` embeddings lacks.

    trees: trees or sequences. where: names one by its index. Unchecked, such ids would read the last embedding.
    """
    if isinstance(trees, Trees | Ragged) and trees.largest() < size:
        return
    problems = Problems()
    for i, item in enumerate(trees):
        parts: Any = (item.prefix, *item.branches) if isinstance(item, Tree) else (item,)
        token = max(int(ids.max(initial=0)) for ids in parts)
        if token >= size:
            problems.add(
                f"{where(i)}: token {token} is none of the model's, which has 0 to {size - 1}: use the tokenizer "
                "that the model was trained with"
            )
    problems.raise_if_any()


def digest64(content: NDArray[Any] | bytes) -> int:
    """Hash an array's bytes to 64 bits, the same on every machine and in every version."""
    if not isinstance(content, bytes):
        array = np.ascontiguousarray(content)
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def fingerprint_of(digests: NDArray[np.uint64]) -> str:
    """Hash the digests of all rows, in order."""
    return hashlib.sha256(digests.astype("<u8").tobytes()).hexdigest()


def combine_digests(*columns: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash columns of 8-byte elements, [rows] or [rows, n], to one digest per row, uint64 [rows]."""
    parts = [np.ascontiguousarray(column).reshape(len(column), -1).view(np.uint64) for column in columns]
    table = np.concatenate(parts, 1)
    return np.fromiter((digest64(row) for row in table), np.uint64, len(table))
