"""Whole sequences, as a reward model reads them: every row that has something to read, whatever it would teach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.data import conversations as cells
from rlhf_core.data.preferences import FAMILIES, begins_with, parse, require_said, without_prompts
from rlhf_core.data.report import Problems
from rlhf_core.data.source import CHUNK, Records, Source
from rlhf_core.data.texts import read_columns
from rlhf_core.data.token_ids import pretokenised
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, Ints, Turns

Row = tuple[Turns | None, Turns]
"""A prompt, or None where the completion holds it, and a completion."""


@dataclass(frozen=True)
class Whole:
    """The sequences of all rows.

    sides: ("score",), or ("chosen_score", "rejected_score") for preferences. sequences: int32 [n] for each row and
    side; None in rows without a completion. places: names each row, such as "prefs.jsonl row 17".
    """

    sides: tuple[str, ...]
    sequences: list[list[Ints] | None]
    places: list[str]


def encode_whole(records: Records, encoder: Encoder) -> Whole:
    """Tokenise texts, conversations or preferences, EOS last or as the template writes them.

    An empty completion is read like any other; one that is missing (null, or nobody answers) is not. Raises InputError
    naming file and row of the first few problems.
    """
    parts = list(whole_parts(records, encoder))
    sequences = [row for part in parts for row in part.sequences]
    return Whole(parts[0].sides, sequences, [place for part in parts for place in part.places])


def whole_parts(records: Records, encoder: Encoder, *, skip: int = 0) -> Iterator[Whole]:
    """As `encode_whole`, a part of the rows at a time. skip: parts that are passed over, and taken to be right."""
    columns = set(records.columns)
    paired = any(set(family) <= columns for family in (("chosen", "rejected"), *FAMILIES))
    sides = ("chosen_score", "rejected_score") if paired else ("score",)
    number = 0
    for source in records.sources:
        doubled: list[int] = []
        whole = True
        for start in range(0, len(source.rows), CHUNK):
            number += 1
            if number <= skip:
                whole = False
                continue
            part = source.part(start, start + CHUNK)
            read, repeats = (_pairs if paired else _texts)(part, encoder)
            doubled += [start + i for i in repeats]
            yield Whole(sides, read, [part.where(i) for i in range(len(part.rows))])
        if whole:
            require_said(source, doubled, encoder.options.prompt_repeated)


Read = tuple[list[list[Ints] | None], list[int]]
"""The sequences of every row, and the rows whose completion begins with the prompt that is put before it."""


def _pairs(source: Source, encoder: Encoder) -> Read:
    problems = Problems()
    family = next((names for names in FAMILIES if set(names) <= set(source.columns)), None)
    if family is not None:
        sides = [pretokenised(source, name, encoder.tokenizer, problems) for name in family]
        problems.stop()
        return [list(each) for each in zip(*sides, strict=True)], []
    there = [i for i, row in enumerate(source.rows) if _has(row, "chosen") and _has(row, "rejected")]
    kept = source.take(there, "complete")
    parsed = parse(kept, problems, encoder.options.prompt_repeated) if there else []
    problems.stop()
    rows = [[(each.prompt, each.chosen), (each.prompt, each.rejected)] for each in parsed]
    doubled = [i for i, each in zip(there, parsed, strict=True) if each.doubled]
    return _encoded(source, there, rows, encoder), doubled


def _texts(source: Source, encoder: Encoder) -> Read:
    columns = read_columns(source)
    prompted, last = columns[0] == "prompt", columns[-1]
    chat = {name: name == "messages" or cells.is_chat(source, name) for name in columns}
    problems = Problems()
    there: list[int] = []
    rows: list[Row] = []
    for i, row in enumerate(source.rows):
        if not _has(row, last):
            continue
        found = [p for p in (cells.cell_problem(row, name, chat[name]) for name in columns) if p]
        if found:
            problems.add(f"{source.where(i)}: {'; '.join(found)}")
        elif encoder.options.read_at == "template" or cells.is_answered(row[last]):
            there.append(i)
            rows.append((row["prompt"] if prompted else None, row[last]))
    problems.stop()
    repeated = encoder.options.prompt_repeated
    if prompted and not any(chat.values()):
        texts: list[Any] = rows
        rows = without_prompts(source, there, texts, [last], repeated, problems)
        problems.stop()
    doubled = [i for i, row in zip(there, rows, strict=True) if not repeated and begins_with(*row)]
    return _encoded(source, there, [[row] for row in rows], encoder), doubled


def _has(row: Mapping[str, Any], column: str) -> bool:
    """Whether a row has something in a column; one without the column is malformed, which `cell_problem` says."""
    return column not in row or row[column] is not None


def _encoded(
    source: Source, there: Sequence[int], rows: Sequence[Sequence[Row]], encoder: Encoder
) -> list[list[Ints] | None]:
    """The sequences of the rows that are there, in their places among all rows of the source."""
    if any(not isinstance(part, str | None) for row in rows for side in row for part in side):
        cells.require_template(source, encoder)
    problems = Problems()
    texts: list[tuple[str, bool]] = []
    chat: list[bool] = []
    for i, row in zip(there, rows, strict=True):
        try:
            tools, kwargs = cells.tools_of(source.rows[i]), cells.kwargs_of(source.rows[i])
            written = [encoder.whole_text(prompt, side, tools=tools, kwargs=kwargs) for prompt, side in row]
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
            continue
        texts += [text for text, _ in written]
        chat += [by_template for _, by_template in written]
    problems.stop()
    ids = iter(encoder.closed(texts, chat))
    found: list[list[Ints] | None] = [None] * len(source.rows)
    for i, row in zip(there, rows, strict=True):
        found[i] = [next(ids) for _ in row]
    return found
