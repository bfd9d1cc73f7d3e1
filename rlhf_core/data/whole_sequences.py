"""Encode whole sequences for scoring: every row with a completion, whether or not it could be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import rlhf_core.data.columns as cells
from rlhf_core.data.best_of_n import completion_lists
from rlhf_core.data.encoded import Notes, refuse_repeats
from rlhf_core.data.preferences import FAMILIES, parse_pairs, read_token_ids, repeats_prompt, strip_prompts
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.table import CHUNK, Records, Table
from rlhf_core.data.texts import read_columns
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, Ints, Turns, join

NOTES = ("after_reply", "left_out")
Row = tuple[Turns | None, Turns]
"""(prompt, completion); the prompt is None if the completion contains it."""


@dataclass(frozen=True)
class Whole:
    """The sequences of all rows.

    sides: ("score",), or ("chosen_score", "rejected_score") for preferences, or ("chosen_scores", "rejected_scores")
    for lists of completions. sequences: int32 [n] per row and side, or per completion of both lists; None for rows
    without a completion. places: name of each row, such as "prefs.jsonl row 17". chosen: how many of a row's sequences
    are of its first side; None unless rows have lists.
    """

    sides: tuple[str, ...]
    sequences: list[list[Ints] | None]
    places: list[str]
    chosen: list[int] | None = None


def whole_parts(
    records: Records, encoder: Encoder, *, skip: int = 0, report: Report | None = None
) -> Iterator[Whole]:
    """Tokenise texts, conversations, preferences or lists of completions, `CHUNK` rows at a time.

    They end with EOS or as the template does. Includes empty completions, but not missing ones (null, or no assistant
    turn). skip: number of parts to skip without checking them. report: gets the rows of which the chat template leaves
    something out. Raises InputError naming file and row of the first few problems.
    """
    columns = set(records.columns)
    paired = any(set(family) <= columns for family in (("chosen", "rejected"), *FAMILIES))
    sides: tuple[str, ...] = ("chosen_score", "rejected_score") if paired else ("score",)
    encode: Callable[..., EncodedRows] = _encode_pairs if paired else _encode_texts
    listed = paired and any(map(completion_lists, records.tables))
    if listed:
        sides, encode = ("chosen_scores", "rejected_scores"), partial(_encode_pairs, lists=True)
    number = 0
    for table in records.tables:
        doubled: list[int] = []
        complete = True
        for start in range(0, len(table.rows), CHUNK):
            number += 1
            if number <= skip:
                complete = False
                continue
            part = table.part(start, start + CHUNK)
            notes = Notes(NOTES)
            sequences, repeats = encode(part, encoder, notes)
            if report is not None:
                notes.record(part, report)
            doubled += [start + i for i in repeats]
            chosen = [len(row["chosen"] or ()) for row in part.rows] if listed else None
            yield Whole(sides, sequences, [part.where(i) for i in range(len(part.rows))], chosen)
        if complete:
            refuse_repeats(table, doubled, encoder.options.prompt_repeated)


EncodedRows = tuple[list[list[Ints] | None], list[int]]
"""The sequences of every row, and the rows whose completion repeats its prompt."""


def _encode_pairs(table: Table, encoder: Encoder, notes: Notes, *, lists: bool = False) -> EncodedRows:
    problems = Problems()
    family = next((names for names in FAMILIES if set(names) <= set(table.columns)), None)
    if family is not None:
        sides = [read_token_ids(table, name, encoder.tokenizer, problems) for name in family]
        problems.raise_if_any()
        return [list(row) for row in zip(*sides, strict=True)], []
    parsed = parse_pairs(table, problems, encoder.options.prompt_repeated, lists=lists, complete=True)
    problems.raise_if_any()
    rows = [[(p.prompt, completion) for completion in p.completions] for p in parsed]
    sequences = _encode_rows(table, [p.row for p in parsed], rows, encoder, notes)
    return sequences, [p.row for p in parsed if p.doubled]


def _encode_texts(table: Table, encoder: Encoder, notes: Notes) -> EncodedRows:
    columns = read_columns(table)
    prompted, last = columns[0] == "prompt", columns[-1]
    chat = {name: name == "messages" or cells.is_chat(table, name) for name in columns}
    problems = Problems()
    used: list[int] = []
    rows: list[Row] = []
    for i, row in enumerate(table.rows):
        if not _may_have(row, last):
            continue
        row_problems = [p for p in (cells.cell_problem(row, name, chat[name]) for name in columns) if p]
        if row_problems:
            problems.add(f"{table.where(i)}: {'; '.join(row_problems)}")
        elif encoder.options.read_at == "template" or cells.is_answered(row[last]):
            used.append(i)
            rows.append((row["prompt"] if prompted else None, row[last]))
    problems.raise_if_any()
    repeated = encoder.options.prompt_repeated
    if prompted and not any(chat.values()):
        texts: list[Any] = rows
        rows = strip_prompts(table, used, texts, repeated, problems)
        problems.raise_if_any()
    doubled = [i for i, row in zip(used, rows, strict=True) if not repeated and repeats_prompt(*row)]
    return _encode_rows(table, used, [[row] for row in rows], encoder, notes), doubled


def _may_have(row: Mapping[str, Any], column: str) -> bool:
    """Whether a row's cell is not null; a row without the column passes, and `cell_problem` reports it."""
    return column not in row or row[column] is not None


def _encode_rows(
    table: Table, used: Sequence[int], rows: Sequence[Sequence[Row]], encoder: Encoder, notes: Notes
) -> list[list[Ints] | None]:
    """Encode the rows with indices `used` into a list over all rows of the table."""
    if any(not isinstance(part, str | None) for row in rows for side in row for part in side):
        cells.require_template(table, encoder)
    problems = Problems()
    texts: list[tuple[str, bool]] = []
    chat: list[bool] = []
    for i, row in zip(used, rows, strict=True):
        try:
            tools, kwargs = cells.tools_of(table.rows[i]), cells.kwargs_of(table.rows[i])
            wholes = [join(prompt, side) for prompt, side in row]
            texts += [notes.write_judged(i, encoder, whole, tools, kwargs) for whole in wholes]
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
            continue
        chat += [not isinstance(whole, str) for whole in wholes]
    problems.raise_if_any()
    ids = iter(encoder.tokenize_closed(texts, chat))
    sequences: list[list[Ints] | None] = [None] * len(table.rows)
    for i, row in zip(used, rows, strict=True):
        sequences[i] = [next(ids) for _ in row]
    return sequences
