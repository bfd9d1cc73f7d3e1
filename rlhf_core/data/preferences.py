"""Preference pairs from every layout they are published in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import ROWS, Arrays, Tokens, flat
from rlhf_core.data.encoded import Pair as Pair
from rlhf_core.data.encoded import Pairs as Pairs
from rlhf_core.data.report import Problems, Report, shorten
from rlhf_core.data.row_selection import Notes, Selection, check, finished, sequences, together
from rlhf_core.data.source import Records, Source
from rlhf_core.data.token_ids import facts, pretokenised, prompt_ids, unknown_id
from rlhf_core.errors import InputError
from rlhf_core.packing.rows import shared_prefix
from rlhf_core.tokenizer.encoding import Encoder, Ints, TextOptions, Turns, first_after, join

ACCEPTED = (
    "prompt + chosen + rejected, or chosen + rejected, as texts or conversations; or token ids: "
    "input_ids_chosen + input_ids_rejected, chosen_ids + rejected_ids, chosen_input_ids + rejected_input_ids"
)
FAMILIES = (
    ("input_ids_chosen", "input_ids_rejected"),
    ("chosen_ids", "rejected_ids"),
    ("chosen_input_ids", "rejected_input_ids"),
)


def margin_of(row: Mapping[str, Any], place: str, problems: Problems) -> float:
    """The row's margin in reward units, 0 where it has none; NaN where it is wrong, which `problems` then says."""
    return 0.0 if row.get("margin") in (None, "") else number_of(row, "margin", place, problems)


def number_of(row: Mapping[str, Any], column: str, place: str, problems: Problems) -> float:
    """The row's number in `column`; NaN where there is none, which `problems` then says."""
    value = row.get(column)
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < 3e38:  # float32's largest; NaN too
        problems.add(f"{place}: '{column}' is {value!r}, not a finite number")
    return number


class Preference(NamedTuple):
    """A preference before tokenisation."""

    prompt: Turns | None
    """None: both sides hold it themselves."""
    chosen: Turns
    rejected: Turns
    doubled: bool = False
    """Whether a completion begins with the prompt that will be put before it."""


def parse(source: Source, problems: Problems, prompt_repeated: bool | None = None) -> list[Preference]:
    """Prompt and completions of every row; rows that are wrong are added to `problems` and left out.

    prompt_repeated: as in `TextOptions`, of texts; whether a conversation holds its prompt is seen by its turns.
    """
    columns = set(source.columns)
    if not {"chosen", "rejected"} <= columns:
        raise cells.missing(source, ("chosen", "rejected"), ACCEPTED)
    names = [name for name in ("prompt", "chosen", "rejected") if name in columns]
    chat = {name: cells.is_chat(source, name) for name in names}
    if chat["chosen"] != chat["rejected"]:
        raise InputError(
            f"{source.where(0)}: one of 'chosen' and 'rejected' is a conversation, the other is not: make both "
            "texts or both lists of messages"
        )
    whole: list[Mapping[str, Any]] = []
    index: list[int] = []
    for i, row in enumerate(source.rows):
        found = [p for p in (cells.cell_problem(row, name, chat[name]) for name in names) if p]
        if not found and chat["chosen"]:
            found = [p for p in map(cells.unanswered, [row] * 2, ("chosen", "rejected")) if p]
        if found:
            problems.add(f"{source.where(i)}: {'; '.join(found)}")
        else:
            whole.append(row)
            index.append(i)
    if "prompt" not in columns:
        return [Preference(None, row["chosen"], row["rejected"]) for row in whole]
    if not chat["prompt"] and not chat["chosen"]:
        texts = [(row["prompt"], row["chosen"], row["rejected"]) for row in whole]
        split = without_prompts(source, index, texts, ("chosen", "rejected"), prompt_repeated, problems)
        return [Preference(*each, doubled=not prompt_repeated and begins_with(*each)) for each in split]
    parsed: list[Preference] = []
    for i, row in zip(index, whole, strict=True):
        sides = [_completion(row["prompt"], row[name], name) for name in ("chosen", "rejected")]
        fine = [side for side in sides if not isinstance(side, _Misfit)]
        if misfits := [side.problem for side in sides if isinstance(side, _Misfit)]:
            problems.add(f"{source.where(i)}: {'; '.join(misfits)}")
        if len(fine) == 2 and fine[0][0] != fine[1][0]:
            problems.add(f"{source.where(i)}: 'chosen' and 'rejected' have different turns before the answer")
        elif len(fine) == 2:
            parsed.append(Preference(*fine[0], fine[1][1]))
    return parsed


T = TypeVar("T", bound=tuple[str, ...])


def without_prompts(
    source: Source,
    index: Sequence[int],
    rows: Sequence[T],
    names: Sequence[str],
    repeated: bool | None,
    problems: Problems,
) -> list[T]:
    """Rows of texts, a prompt and its completions, without the prompt at the start of these where `repeated`.

    index: the rows' places in the source. names: the columns of the completions. repeated: as
    `TextOptions.prompt_repeated`; a row that does not begin so is then added to `problems`.
    """
    if not repeated:
        return list(rows)
    for i, (prompt, *sides) in zip(index, rows, strict=True):
        odd = [name for name, side in zip(names, sides, strict=True) if not side.startswith(prompt)]
        if odd:
            problems.add(
                f"{source.where(i)}: 'prompt' is not the start of '{odd[0]}', as prompt_repeated = true says"
            )
    return [(row[0], *(side[len(row[0]) :] for side in row[1:])) for row in rows]  # type: ignore[misc]


def require_said(source: Source, doubled: Sequence[int], repeated: bool | None) -> None:
    """Raise InputError where most rows of a source have a completion that begins with its prompt, and nobody said
    whether that prompt is to be read twice. doubled: these rows. repeated: as `TextOptions.prompt_repeated`.
    """
    if repeated is None and len(doubled) * 2 > len(source.rows):
        rows = shorten([source.where(i) for i in doubled])
        raise InputError(
            f"{source.name}: in {len(doubled):,} of {len(source.rows):,} rows a completion begins with the text of its "
            f"prompt ({rows}): set prompt_repeated = true to take it off, or prompt_repeated = false where the model "
            "shall read it twice"
        )


def begins_with(prompt: Turns | None, *completions: Turns) -> bool:
    """Whether one of the texts begins with the text of the prompt."""
    if not isinstance(prompt, str) or not prompt.strip():
        return False
    return any(isinstance(text, str) and text.lstrip().startswith(prompt.strip()) for text in completions)


@dataclass(frozen=True)
class _Misfit:
    problem: str


def _completion(prompt: Turns, side: Turns, name: str) -> tuple[Turns, Turns] | _Misfit:
    """(prompt, completion), where a side is the completion or a whole conversation that holds the prompt."""
    if isinstance(side, str):
        return prompt, side
    before = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
    )
    turns = [dict(turn) for turn in side]
    if len(turns) > len(before) and turns[: len(before)] == before:
        return before, turns[len(before) :]
    if turns[0]["role"] in ("assistant", "tool"):
        return before, turns
    if isinstance(prompt, str):  # the whole conversation may say more before the prompt
        asked = [
            k for k, turn in enumerate(turns[:-1]) if turn["role"] == "user" and turn["content"] == prompt
        ]
        if asked:
            return turns[: asked[-1] + 1], turns[asked[-1] + 1 :]
        return _Misfit(f"'prompt' is no user turn of '{name}', which is a whole conversation")
    return _Misfit(f"'prompt' is not the start of '{name}', which is a whole conversation")


SIDES = ("chosen", "rejected")
NOTES = ("doubled", "after_reply", "left_out")


def encode_pairs(
    records: Records,
    tokenizer: Any,
    *,
    max_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | TextOptions | None = None,
    completions: bool = False,
) -> Pairs:
    """Tokenise preferences; the columns decide how they are read, and every row is checked.

    tokenizer: may be None where all rows hold token ids; those are taken as they are, without EOS.
    max_length: tokens of either sequence, prompt included.
    chat_template: as in `template_text`, or all options of `TextOptions`.
    overlong: "filter" drops a pair if one is longer, "truncate" cuts each sequence by `truncation_mode`.
    completions: find where they start (`Pair.starts`): after the prompt; without one, after the turns that both
        conversations begin with, or where texts or ids part. A pair of which the cut leaves no completion is dropped.
    Raises InputError naming file and row of the first few problems, and where no pair is left.
    """
    check(overlong, truncation_mode)
    report = Report("pairs", max_length, read_as=records.remarks)
    encoder = None if tokenizer is None else Encoder(tokenizer, chat_template)
    tokens, unknown = Tokens("completions" if completions else "pairs", encoder), unknown_id(tokenizer)
    selections: list[Selection] = []
    lengths: list[NDArray[np.int64]] = []
    starts: list[NDArray[np.int64]] = []
    for source, offset in zip(records.sources, records.offsets(), strict=True):
        encode = partial(_with_facts, encoder=encoder, completions=completions)
        rows = Selection(source, offset, tokens.of(source, encode), SIDES, report)
        if encoder is not None:
            require_said(source, rows.arrays[f"doubled{ROWS}"].tolist(), encoder.options.prompt_repeated)
        firsts = np.array(rows.arrays["starts"]) if completions else np.zeros((len(rows), 2), np.int64)
        rows.drop(~_answered(rows, firsts, completions), report.empty)
        lengths.append(rows.longest[rows.used])
        identical = _alike(rows)
        over = rows.over(max_length)
        if max_length is not None and overlong == "truncate":
            lost = rows.cut(max_length, truncation_mode)
            firsts = np.maximum(firsts - np.stack([lost[name] for name in SIDES], 1), 0)
            rows.reread(over, unknown)
            rows.drop(~_answered(rows, firsts, completions), report.filtered)
            rows.tell(over & rows.used, report.truncated)
            rows.tell(over & rows.used & ~identical & _alike(rows), report.alike_once_cut)
        else:
            rows.drop(over, report.filtered)
        rows.tell(identical & rows.used, report.identical)
        rows.tell_notes(NOTES)
        named = [name for name in ("prompt", *SIDES) if name in source.columns]
        if "chosen" in named and cells.skips_template(source, encoder, *named):
            rows.tell(rows.used, report.untemplated)
        selections.append(rows)
        starts.append(firsts)
    places, digests = finished(records, selections, lengths, "max_sequence_length")
    return Pairs(
        sequences(selections, "chosen"),
        sequences(selections, "rejected"),
        together(selections, [rows.arrays["margin"] for rows in selections]),
        together(selections, starts) if completions else None,
        together(selections, [rows.shared for rows in selections if rows.shared is not None]),
        digests,
        report,
        places,
    )


def _answered(rows: Selection, firsts: NDArray[np.int64], completions: bool) -> NDArray[np.bool_]:
    """Whether both sides have a token, and one of a completion that another token predicts where those count."""
    least = np.maximum(firsts, 1) if completions else firsts
    lengths = np.stack([rows.lengths(name) for name in SIDES], 1)
    return np.asarray((lengths > least).all(1))


def _alike(rows: Selection) -> NDArray[np.bool_]:
    """Whether both sides are the same tokens."""
    alike: NDArray[np.bool_] = rows.digests[:, 0] == rows.digests[:, 1]
    return alike & (rows.lengths("chosen") == rows.lengths("rejected"))


def _with_facts(source: Source, encoder: Encoder | None, completions: bool) -> Arrays:
    arrays = _encode(source, encoder, completions)
    return arrays | facts(arrays, SIDES, unknown_id(None if encoder is None else encoder.tokenizer))


def _encode(source: Source, encoder: Encoder | None, completions: bool) -> Arrays:
    """Of every row chosen and rejected ids, none where its completion is empty, and margin; the doubled rows; where
    asked for, where the completions start, int64 [rows, 2].
    """
    columns = source.columns
    problems = Problems()
    margins = [margin_of(row, source.where(i), problems) for i, row in enumerate(source.rows)]
    for family in FAMILIES:
        if set(family) <= set(columns):
            tokenizer = None if encoder is None else encoder.tokenizer
            given = [pretokenised(source, name, tokenizer, problems) for name in family]
            problems.stop()
            arrays = _arrays(given[0], given[1], margins, Notes(NOTES))
            if completions:
                prompts = prompt_ids(source, tokenizer, Problems())
                parting = map(_parting, *given) if prompts is None else ((len(p),) * 2 for p in prompts)
                arrays["starts"] = np.array(list(parting), np.int64)
            return arrays
    repeated = None if encoder is None else encoder.options.prompt_repeated
    preferences = parse(source, problems, repeated)
    problems.stop()
    if encoder is None:
        raise InputError(f"{source.name} has text, which needs a tokenizer")
    if not all(isinstance(p.chosen, str) for p in preferences):
        cells.require_template(source, encoder)
    texts: list[tuple[str, bool]] = []
    chat: list[bool] = []
    openings: list[tuple[str, bool]] = []
    used: list[int] = []
    notes = Notes(NOTES)
    notes.rows["doubled"] = {i for i, p in enumerate(preferences) if p.doubled}
    for i, p in enumerate(preferences):
        if cells.is_blank(p.chosen) or cells.is_blank(p.rejected):
            continue
        try:
            tools, kwargs = cells.tools_of(source.rows[i]), cells.kwargs_of(source.rows[i])
            for side in (p.chosen, p.rejected):
                texts.append(notes.written(i, encoder, join(p.prompt, side), tools, kwargs))
                chat.append(not isinstance(side, str) or not isinstance(p.prompt, str | None))
            if completions:
                p = preferences[i] = _split(p)
                openings.append(encoder.opening(p.prompt, p.chosen, tools=tools, kwargs=kwargs))
            used.append(i)
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
    problems.stop()
    ids = encoder.closed(texts, chat)
    chosen, rejected = (dict(zip(used, ids[side::2], strict=True)) for side in (0, 1))
    rows = range(len(preferences))
    arrays = _arrays([chosen.get(i) for i in rows], [rejected.get(i) for i in rows], margins, notes)
    if completions:
        starts = np.zeros((len(preferences), 2), np.int64)
        for i, before in zip(used, encoder.opened(openings), strict=True):
            apart = preferences[i].prompt is None
            sides = chosen[i], rejected[i]
            starts[i] = _parting(*sides) if apart else [first_after(before, ids) for ids in sides]
        arrays["starts"] = starts
    return arrays


def _parting(chosen: Ints, rejected: Ints) -> tuple[int, int]:
    """Where two sequences part, for each of them."""
    return (shared_prefix((chosen, rejected)),) * 2 if len(chosen) and len(rejected) else (0, 0)


def _split(preference: Preference) -> Preference:
    """Conversations that hold their prompt themselves: the turns that both begin with become the prompt."""
    chosen, rejected = preference.chosen, preference.rejected
    if preference.prompt is not None or isinstance(chosen, str) or isinstance(rejected, str):
        return preference
    most = min(len(chosen), len(rejected)) - 1
    same = next((k for k in range(most) if chosen[k] != rejected[k]), most)
    return preference._replace(prompt=chosen[:same], chosen=chosen[same:], rejected=rejected[same:])


def _arrays(
    chosen: Sequence[Ints | None],
    rejected: Sequence[Ints | None],
    margins: Sequence[float],
    notes: Notes,
) -> Arrays:
    return {
        **flat("chosen", chosen),
        **flat("rejected", rejected),
        "margin": np.array(margins, np.float64),
        **notes.arrays(),
    }
