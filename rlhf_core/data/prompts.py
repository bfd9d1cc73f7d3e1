"""Prompts for rollouts, with whatever else their rows hold for the reward functions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import REWARD
from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import Arrays, Tokens, flat, ragged
from rlhf_core.data.notes import Notes
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Records, Source, json_text
from rlhf_core.data.tokens import Seen, combined, digest64, digest_ids
from rlhf_core.encoding import Encoder, Ints, TextOptions, Turns
from rlhf_core.errors import InputError

NOTES = ("left_out",)
ACCEPTED = "prompt as a text or a conversation; every other column reaches the reward functions"


@dataclass(frozen=True)
class Prompts:
    """Encoded prompts."""

    ids: list[Ints]
    """int32 [n] each: what a completion is sampled after."""
    raw: list[Turns]
    """Each prompt as the data has it: a text, or a list of messages."""
    chat: bool
    """Whether the prompts are conversations: completions then reach the reward functions as messages."""
    columns: dict[str, list[Any]]
    """The other columns, one value a prompt, None where a row lacks it."""
    report: Report
    places: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def where(self, i: int) -> str:
        """Names the row of prompt `i`, such as "prompts.jsonl row 17"."""
        return self.places[i]

    @property
    def fingerprint(self) -> str:
        """Of the prompts' tokens, in order."""
        return digest_ids(self.ids)

    def row_digests(self) -> NDArray[np.uint64]:
        """uint64 [prompts]: of each row's tokens, and of all that its row gives to the reward functions."""
        tokens = np.array([digest64(ids) for ids in self.ids], np.uint64)
        rows = np.array([digest64(json_text(self._row(i)).encode()) for i in range(len(self))], np.uint64)
        return combined(tokens, rows)

    def _row(self, i: int) -> dict[str, Any]:
        """What the row has, without its nulls: whether other rows have more columns makes no difference."""
        row = {"prompt": self.raw[i], **{name: values[i] for name, values in self.columns.items()}}
        return {name: row[name] for name in sorted(row) if row[name] is not None}


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
    cells.check_overlong(overlong)
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
    report = Report("prompts", max_prompt_length)
    out = Prompts([], [], chat[0], {name: [] for name in records.columns if name != "prompt"}, report, [])
    known, seen = Tokens("prompts", encoder), Seen(report, tokenizer)
    lengths: list[int] = []
    for source in records.sources:
        encoded = known.of(source, partial(_encode, source, encoder, chat[0]))
        notes = Notes.of(encoded, NOTES)
        untemplated = cells.skips_template(source, encoder, "prompt")
        for i, ids in enumerate(ragged(encoded, "ids")):
            report.total += 1
            row, place = source.rows[i], source.where(i)
            if not len(ids):
                report.empty.append(place)
                continue
            lengths.append(len(ids))
            if max_prompt_length is not None and len(ids) > max_prompt_length:
                if overlong == "filter":
                    report.filtered.append(place)
                    continue
                report.truncated.append(place)
                ids = cells.cut(ids, max_prompt_length, truncation_mode)
            notes.tell(i, place, report)
            report.untemplated += [place] * untemplated
            seen.note(place, ids)
            out.ids.append(ids)
            out.raw.append(row["prompt"])
            out.places.append(place)
            for name, values in out.columns.items():
                values.append(row.get(name))
    report.kept = len(out)
    report.require_some(records.name, lengths, "max_prompt_length")
    return out


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
