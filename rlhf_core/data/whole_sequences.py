"""Whole sequences for scoring: every row with a completion, whether or not it could be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_core.data.best_of_n import completion_lists
from rlhf_core.data.parts import Notes, Parser, doubled_rows, encode_completions, parse_rows, refuse_repeats
from rlhf_core.data.preferences import SIDES, id_columns, pair_parser, read_ids
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.table import CHUNK, Records, Table
from rlhf_core.data.texts import text_parser
from rlhf_core.tokenizer.encoding import Encoder, Ints

NOTES = ("after_reply", "left_out")


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
    paired = set(SIDES) <= set(records.columns) or any(map(id_columns, records.tables))
    listed = paired and any(map(completion_lists, records.tables))
    sides: tuple[str, ...] = ("score",)
    if listed:
        sides = ("chosen_scores", "rejected_scores")
    elif paired:
        sides = ("chosen_score", "rejected_score")
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
            sequences, repeats = _encode(part, encoder, report, paired=paired, listed=listed)
            doubled += [start + i for i in repeats]
            chosen = [len(row["chosen"] or ()) for row in part.rows] if listed else None
            yield Whole(sides, sequences, [part.where(i) for i in range(len(part.rows))], chosen)
        if complete:
            refuse_repeats(table, doubled, encoder.options.prompt_repeated)


def _encode(
    table: Table, encoder: Encoder, report: Report | None, *, paired: bool, listed: bool
) -> tuple[list[list[Ints] | None], list[int]]:
    """Return the sequences of every row, and the rows whose completion repeats its prompt."""
    problems = Problems()
    notes = Notes(NOTES, len(table.rows))
    if paired and not listed and id_columns(table) is not None:
        return [
            [chosen, rejected] for _, chosen, rejected in read_ids(table, encoder.tokenizer, problems)
        ], []
    parse: Parser
    if paired:
        parse = pair_parser(table, encoder.options, may_be_blank=True, may_be_null=True, lists=listed)
    else:
        parse = text_parser(table, encoder.options, scored=True)
    rows = parse_rows(table, parse, problems)
    sequences = encode_completions(table, rows, encoder, notes)
    if report is not None:
        notes.record(table, report)
    return sequences, doubled_rows(rows)
