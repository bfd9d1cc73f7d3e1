"""Read columns of token ids, and compute digests and other facts of token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.report import Problems
from rlhf_core.data.source import Source
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
