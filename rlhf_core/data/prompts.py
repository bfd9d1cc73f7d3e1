"""Prompts for rollouts, with whatever else their rows hold for the reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import REWARD
from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import Arrays, Tokens, flat
from rlhf_core.data.ragged_arrays import Ragged
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.row_selection import Notes, Selection, check, finished, sequences, together
from rlhf_core.data.source import Cells, Changed, Places, Records, Source, digest, json_text
from rlhf_core.data.token_ids import combined, digest64, facts, fingerprint_of, unknown_id
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, TextOptions, Turns

NOTES = ("left_out",)
ACCEPTED = "prompt as a text or a conversation; every other column reaches the reward functions"


@dataclass(frozen=True)
class Prompts:
    """Encoded prompts; what their rows hold beside the tokens is read when it is asked for."""

    ids: Ragged
    """int32 [n] each: what a completion is sampled after."""
    raw: Sequence[Turns]
    """Each prompt as the data has it: a text, or a list of messages."""
    chat: bool
    """Whether the prompts are conversations: completions then reach the reward functions as messages."""
    columns: dict[str, Sequence[Any]]
    """The other columns, one value per prompt, None where a row lacks it."""
    digests: NDArray[np.uint64]
    """[prompts, 2]: of the tokens of each, and of its row."""
    report: Report
    places: Places

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, i: int) -> str:
        """Names the row of prompt `i`, such as "prompts.jsonl row 17"."""
        return self.places[i]

    @property
    def rows(self) -> NDArray[np.int64]:
        """The number, among the rows of all sources, of the row that each prompt comes from."""
        return self.places.rows

    @property
    def fingerprint(self) -> str:
        """Of the prompts' tokens, in order."""
        return fingerprint_of(self.digests[:, 0])

    def row_digests(self) -> NDArray[np.uint64]:
        """uint64 [prompts]: of each row's tokens, and of all that its row gives to the reward functions."""
        return combined(self.digests)


def encode_prompts(
    records: Records,
    tokenizer: Any,
    *,
    max_prompt_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | TextOptions | None = None,
) -> Prompts:
    """Tokenise prompts; conversations open an assistant turn.

    chat_template: as in `template_text`, or all options of `TextOptions`.
    max_prompt_length: tokens; longer prompts are dropped ("filter") or cut by `truncation_mode` ("truncate").
    Raises InputError naming file and row of the first few problems, and where no prompt is left.
    """
    check(overlong, truncation_mode)
    encoder = Encoder(tokenizer, chat_template)
    reserved = [name for name in REWARD.arguments if name in records.columns]
    if reserved:
        taken = ", ".join(map(repr, reserved))
        raise InputError(f"{records.name}: rename column {taken}: reward functions are called with that name")
    chat = [cells.is_chat(source, "prompt") for source in records.sources]
    if len(set(chat)) > 1:
        names = [records.sources[chat.index(kind)].name for kind in (True, False)]
        raise InputError(
            f"the prompts of {names[0]} are conversations and those of {names[1]} texts: use one kind"
        )
    report = Report("prompts", max_prompt_length, read_as=records.remarks)
    known, unknown = Tokens("prompts", encoder), unknown_id(tokenizer)
    selections: list[Selection] = []
    lengths: list[NDArray[np.int64]] = []
    for source, offset in zip(records.sources, records.offsets(), strict=True):
        encode = partial(_with_facts, encoder=encoder, chat=chat[0])
        rows = Selection(source, offset, known.of(source, encode), ("ids",), report)
        rows.drop(rows.longest == 0, report.empty)
        lengths.append(rows.longest[rows.used])
        over = rows.over(max_prompt_length)
        if max_prompt_length is not None and overlong == "truncate":
            rows.cut(max_prompt_length, truncation_mode)
            rows.reread(over, unknown)
            rows.tell(over, report.truncated)
        else:
            rows.drop(over, report.filtered)
        rows.tell_notes(NOTES)
        if cells.skips_template(source, encoder, "prompt"):
            rows.tell(rows.used, report.untemplated)
        selections.append(rows)
    places, digests = finished(records, selections, lengths, "max_prompt_length")
    given = together(selections, [rows.arrays["row_digest"] for rows in selections])
    return Prompts(
        sequences(selections, "ids"),
        Cells(records, places.rows, "prompt"),
        chat[0],
        {name: Cells(records, places.rows, name) for name in records.columns if name != "prompt"},
        np.concatenate([digests, given[:, None]], 1),
        report,
        places,
    )


def _with_facts(source: Source, encoder: Encoder, chat: bool) -> Arrays:
    """What `_encode` gives, `facts` of the ids, and a digest of each row: of its columns that are not null."""
    arrays = _encode(source, encoder, chat)
    rows = (
        json_text({name: row[name] for name in sorted(row) if row[name] is not None}).encode()
        for row in source.rows
    )
    given = np.fromiter(map(digest64, rows), np.uint64, len(source.rows))
    return {**arrays, **facts(arrays, ("ids",), unknown_id(encoder.tokenizer)), "row_digest": given}


def _encode(source: Source, encoder: Encoder, chat: bool) -> Arrays:
    """Ids of every row; none for a prompt that is an empty text and that the tokenizer adds nothing to."""
    if "prompt" not in source.columns:
        raise cells.missing(source, ("prompt",), ACCEPTED)
    if chat:
        cells.require_template(source, encoder)
    problems = Problems()
    texts: list[tuple[str, bool]] = []
    notes = Notes(NOTES)
    for i, row in enumerate(source.rows):
        if problem := cells.cell_problem(row, "prompt", chat):
            problems.add(f"{source.where(i)}: {problem}")
            continue
        try:
            tools, kwargs = cells.tools_of(row), cells.kwargs_of(row)
            texts.append(encoder.text(row["prompt"], open_turn=True, tools=tools, kwargs=kwargs))
            if chat:
                notes.add("left_out", i, encoder.chat.leaves_out(row["prompt"], texts[-1][0], tools))
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
    problems.stop()
    return {**flat("ids", encoder.opened(texts)), **notes.arrays()}


def as_prompts(records: Records) -> Records:
    """Rows with `messages` and no `prompt` get one: their conversation without the replies at its end.

    Raises InputError, naming the rows, for conversations that are none, and for those that nobody asks anything in.
    """
    return Records([_asked(source) for source in records.sources])


def _asked(source: Source) -> Source:
    if "prompt" in source.columns or "messages" not in source.columns:
        return source
    problems = Problems()
    for i, row in enumerate(source.rows):
        problem = cells.cell_problem(row, "messages", chat=True)
        if problem or not _question(row):
            wrong = problem or "'messages' has no turn to reply to"
            problems.add(f"{source.where(i)}: {wrong}")
    problems.stop()
    return replace(
        source,
        rows=Changed(source.rows, lambda row: {**row, "prompt": _question(row)}),
        fingerprint=digest(source.fingerprint, "messages"),
        known={**source.kinds, "prompt": source.kind("messages")},
        origin=source.source,
    )


def _question(row: Mapping[str, Any]) -> list[Any]:
    """The row's conversation without the replies at its end."""
    turns = list(row["messages"])
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns
