"""Encode preference pairs from the layouts they are published in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import rlhf_core.data.columns as cells
from rlhf_core.config.options import format_value
from rlhf_core.data.best_of_n import list_problem, mixture
from rlhf_core.data.cache import Arrays, TokenCache, flatten
from rlhf_core.data.columns import COLUMNS, ID_NAMES, MASK_NAMES
from rlhf_core.data.encoded import Limit, Notes, RowForm, Selection, list_unread_columns, select
from rlhf_core.data.encoded import Pair as Pair
from rlhf_core.data.encoded import Pairs as Pairs
from rlhf_core.data.report import Problems
from rlhf_core.data.table import Records, Table
from rlhf_core.errors import InputError
from rlhf_core.packing.rows import shared_prefix
from rlhf_core.tokenizer.encoding import Encoder, Ints, TextOptions, Turns, first_after, join

ACCEPTED = (
    "prompt + chosen + rejected, or chosen + rejected, as texts or conversations; or token ids: "
    "input_ids_chosen + input_ids_rejected, chosen_ids + rejected_ids, chosen_input_ids + rejected_input_ids"
)
FORMATS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
FAMILIES = tuple((name.format("chosen"), name.format("rejected")) for name in ID_NAMES)


def read_margin(row: Mapping[str, Any], place: str, problems: Problems) -> float:
    """Read the row's margin in reward units, 0 if it has none; add an invalid one to `problems` and return NaN."""
    return 0.0 if row.get("margin") in (None, "") else read_number(row, "margin", place, problems)


def read_number(row: Mapping[str, Any], column: str, place: str, problems: Problems) -> float:
    """Read the row's number in `column`; add a missing or invalid one to `problems` and return NaN."""
    value = row.get(column)
    try:
        number = math.nan if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < 3e38:  # float32's largest; NaN too
        shown = "null" if value is None else format_value(value)
        problems.add(f"{place}: '{column}' is {shown}, not a finite number")
    return number


SIDES = ("chosen", "rejected")


class Preference(NamedTuple):
    """A prompt and its completions, before tokenisation."""

    row: int
    """Index of the row in its table."""
    prompt: Turns | None
    """None if the completions contain it."""
    completions: Sequence[Turns]
    """Those of `chosen` first; of a pair one each."""
    doubled: bool = False
    """Whether a completion repeats the prompt, which will be put before it."""

    @property
    def chosen(self) -> Turns:
        return self.completions[0]

    @property
    def rejected(self) -> Turns:
        return self.completions[-1]


def parse_pairs(
    table: Table,
    problems: Problems,
    prompt_repeated: bool | None = None,
    *,
    lists: bool = False,
    complete: bool = False,
) -> list[Preference]:
    """Parse every row as a prompt and its completions; add invalid rows to `problems` and leave them out.

    prompt_repeated: as in `TextOptions`, for texts; the turns show whether a conversation contains its prompt.
    lists: `chosen` and `rejected` hold lists of completions. complete: leave out rows in which one of them is null.
    """
    columns = set(table.columns)
    if not {"chosen", "rejected"} <= columns:
        raise cells.missing_columns(table, ("chosen", "rejected"), ACCEPTED, *FORMATS)
    names = [name for name in ("prompt", *SIDES) if name in columns]
    chat = {name: cells.is_chat(table, name) for name in names}
    if chat["chosen"] != chat["rejected"] and not lists:
        raise InputError(
            f"{table.where(0)}: one of 'chosen' and 'rejected' is a conversation, the other is not: make both "
            "texts or both lists of messages"
        )
    parsed: list[Preference] = []
    for i, row in enumerate(table.rows):
        if complete and any(name in row and row[name] is None for name in SIDES):
            continue
        wrong = [
            cells.cell_problem(row, name, chat[name]) for name in names if not lists or name not in SIDES
        ]
        wrong += [list_problem(row, name) for name in SIDES] if lists else []
        if not any(wrong):
            wrong += [mixture(row)] if lists else []
            wrong += [cells.unanswered_problem(row, n) for n in SIDES] if chat["chosen"] and not lists else []
        found: Preference | str = "; ".join(filter(None, wrong))
        if not found:
            sides = [(name, each) for name in SIDES for each in (row[name] if lists else [row[name]])]
            found = _split(i, row.get("prompt"), sides, prompt_repeated)
        if isinstance(found, str):
            problems.add(f"{table.where(i)}: {found}")
        else:
            parsed.append(found)
    return parsed


def _split(
    i: int, prompt: Turns | None, sides: Sequence[tuple[str, Turns]], repeated: bool | None
) -> Preference | str:
    """Take the prompt of row i from its completions; what is wrong is a text. sides: (column, completion)."""
    completions = [side for _, side in sides]
    if prompt is None:
        return Preference(i, None, completions)
    if isinstance(prompt, str) and isinstance(completions[0], str):
        texts = [(prompt, name, side) for name, side in sides if isinstance(side, str)]
        if repeated and (problem := next(filter(None, (_not_repeated(*each) for each in texts)), None)):
            return problem
        cut = len(prompt) if repeated else 0
        doubled = not repeated and repeats_prompt(prompt, *completions)
        return Preference(i, prompt, [side[cut:] for _, _, side in texts], doubled)
    split = [split_prompt(prompt, side, name) for name, side in sides]
    if misfits := [each for each in split if isinstance(each, str)]:
        return "; ".join(dict.fromkeys(misfits))
    (before, _), *others = fine = [each for each in split if not isinstance(each, str)]
    if any(other != before for other, _ in others):
        named = "'chosen' and 'rejected'" if len(sides) == 2 else "the completions"
        return f"{named} have different turns before the answer"
    return Preference(i, before, [side for _, side in fine])


def _not_repeated(prompt: str, name: str, completion: str) -> str | None:
    """Describe a text that does not begin with its prompt, where it should, or return None."""
    if completion.startswith(prompt):
        return None
    return f"'prompt' is not the start of '{name}', as prompt_repeated = true says"


def strip_prompts(
    table: Table,
    used: Sequence[int],
    rows: Sequence[tuple[Any, Any]],
    repeated: bool | None,
    problems: Problems,
) -> list[tuple[Any, Any]]:
    """Strip the prompt from the start of each completion if `repeated`. rows: texts (prompt, completion).

    used: the rows' indices in the table. repeated: `TextOptions.prompt_repeated`; if true, rows whose completion lacks
    the prompt are added to `problems`.
    """
    if not repeated:
        return list(rows)
    for i, (prompt, completion) in zip(used, rows, strict=True):
        if problem := _not_repeated(prompt, "completion", completion):
            problems.add(f"{table.where(i)}: {problem}")
    return [(prompt, completion[len(prompt) :]) for prompt, completion in rows]


def repeats_prompt(prompt: Turns | None, *completions: Turns) -> bool:
    """Whether any of the completions is a text that begins with the prompt."""
    if not isinstance(prompt, str) or not prompt.strip():
        return False
    return any(isinstance(text, str) and text.lstrip().startswith(prompt.strip()) for text in completions)


def split_prompt(prompt: Turns, side: Turns, name: str) -> tuple[Turns, Turns] | str:
    """Split a side, a completion or a whole conversation with the prompt, into (prompt, completion).

    A text says what keeps them apart.
    """
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
    if isinstance(prompt, str):  # other turns may precede the prompt
        matches = [
            k for k, turn in enumerate(turns[:-1]) if turn["role"] == "user" and turn["content"] == prompt
        ]
        if matches:
            return turns[: matches[-1] + 1], turns[matches[-1] + 1 :]
        return f"'prompt' is not a user turn of '{name}', which is a whole conversation"
    return f"'prompt' is not the start of '{name}', which is a whole conversation"


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
    margins: bool = True,
    part: bool = False,
) -> Pairs:
    """Tokenise preferences, reading them by their columns and checking every row.

    tokenizer: may be None if all rows hold token ids; those are used unchanged, without EOS.
    max_length: tokens of either sequence, prompt included.
    chat_template: as in `template_text`, or all options as `TextOptions`.
    overlong: "filter" drops a pair if either sequence is too long, "truncate" cuts each by `truncation_mode`.
    completions: find where they start (`Pair.starts`): after the prompt; without one, after the turns that both
        conversations share, or where texts or ids differ. A pair whose completions are cut away is dropped.
    margins: whether the caller reads them; if not, the report lists the pairs that have one. part: as in `select`.
    Raises InputError naming file and row of the first few problems, and if no pair is left.
    """
    encoder = None if tokenizer is None else Encoder.of(tokenizer, chat_template)

    def firsts(rows: Selection) -> NDArray[np.int64]:
        """Index of the first completion token of each sequence once it is cut, int64 [rows, 2]; else 0."""
        starts = rows.arrays["starts"] if completions else np.zeros((rows.count, 2), np.int64)
        return np.maximum(starts - rows.lost, 0)

    def trainable(rows: Selection) -> NDArray[np.bool_]:
        least = np.maximum(firsts(rows), 1) if completions else 0
        lengths = np.stack([rows.lengths(name) for name in SIDES], 1)
        return np.asarray((lengths > least).all(1))

    encode = partial(_encode, encoder=encoder, completions=completions)
    form = RowForm("pairs", SIDES, NOTES, encode, trainable, _text_columns)
    cache = TokenCache("completions" if completions else "pairs", encoder)
    chosen = select(records, cache, form, Limit(max_length, overlong, truncation_mode), part=part)
    pairs = Pairs(
        chosen.sequences("chosen"),
        chosen.sequences("rejected"),
        chosen.values(lambda rows: rows.arrays["margin"]),
        chosen.values(firsts) if completions else None,
        chosen.values(lambda rows: rows.shared),
        chosen.digests,
        chosen.report,
        chosen.places,
    )
    if not part:
        list_unread_columns(pairs.report, records, _used_columns)
    if not margins:
        pairs.report.unread += [pairs.where(i) for i in np.flatnonzero(pairs.margins).tolist()]
    return pairs


def usable_pairs(table: Table, options: TextOptions) -> NDArray[np.bool_]:
    """Check all rows as far as that needs no tokenizer; tell which could teach something, bool [rows].

    Raises InputError naming file and row of the first few problems.
    """
    problems = Problems()
    for i, row in enumerate(table.rows):
        read_margin(row, table.where(i), problems)
    if any(set(family) <= set(table.columns) for family in FAMILIES):
        problems.raise_if_any()
        return np.ones(len(table.rows), bool)
    parsed = parse_pairs(table, problems, options.prompt_repeated)
    problems.raise_if_any()
    return np.array(
        [
            p.chosen != p.rejected and not (cells.is_blank(p.chosen) or cells.is_blank(p.rejected))
            for p in parsed
        ],
        bool,
    )


def _text_columns(table: Table) -> tuple[str, ...]:
    named = tuple(name for name in ("prompt", *SIDES) if name in table.columns)
    return named if "chosen" in named else ()


def _used_columns(table: Table) -> tuple[str, ...]:
    """List the columns that pairs and their evaluation are read from."""
    if any(set(family) <= set(table.columns) for family in FAMILIES):
        return ("margin", "subset", *(name for name in COLUMNS if "ids" in name or "mask" in name))
    texts = ("prompt", *SIDES)
    chat = any(cells.is_chat(table, name) for name in texts)
    return ("margin", "subset", *texts, *(cells.FOR_TEMPLATES if chat else ()))


def _encode(table: Table, encoder: Encoder | None, completions: bool) -> Arrays:
    """Encode every row's chosen and rejected ids (none if a completion is blank), its margin and notes.

    completions: add "starts", int64 [rows, 2], where the completions start.
    """
    columns = table.columns
    problems = Problems()
    margins = [read_margin(row, table.where(i), problems) for i, row in enumerate(table.rows)]
    for family in FAMILIES:
        if set(family) <= set(columns):
            tokenizer = None if encoder is None else encoder.tokenizer
            sides = [read_token_ids(table, name, tokenizer, problems) for name in family]
            problems.raise_if_any()
            arrays = _arrays(sides[0], sides[1], margins, Notes(NOTES))
            if completions:
                prompts = read_prompt_ids(table, tokenizer, Problems())
                firsts = (
                    map(_first_difference, *sides) if prompts is None else [(len(p),) * 2 for p in prompts]
                )
                arrays["starts"] = np.array(list(firsts), np.int64)
            return arrays
    repeated = None if encoder is None else encoder.options.prompt_repeated
    preferences = parse_pairs(table, problems, repeated)
    problems.raise_if_any()
    if encoder is None:
        raise InputError(f"{table.name} has text, which needs a tokenizer")
    if not all(isinstance(p.chosen, str) for p in preferences):
        cells.require_template(table, encoder)
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
            tools, kwargs = cells.tools_of(table.rows[i]), cells.kwargs_of(table.rows[i])
            for side in (p.chosen, p.rejected):
                texts.append(notes.write_judged(i, encoder, join(p.prompt, side), tools, kwargs))
                chat.append(not isinstance(side, str) or not isinstance(p.prompt, str | None))
            if completions:
                p = preferences[i] = _split_shared_turns(p)
                openings.append(encoder.prompt_text(p.prompt, p.chosen, tools=tools, kwargs=kwargs))
            used.append(i)
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
    problems.raise_if_any()
    ids = encoder.tokenize_closed(texts, chat)
    chosen, rejected = (dict(zip(used, ids[side::2], strict=True)) for side in (0, 1))
    rows = range(len(preferences))
    arrays = _arrays([chosen.get(i) for i in rows], [rejected.get(i) for i in rows], margins, notes)
    if completions:
        starts = np.zeros((len(preferences), 2), np.int64)
        for i, before in zip(used, encoder.tokenize_open(openings), strict=True):
            pair = chosen[i], rejected[i]
            without_prompt = preferences[i].prompt is None
            starts[i] = _first_difference(*pair) if without_prompt else [first_after(before, s) for s in pair]
        arrays["starts"] = starts
    return arrays


def _first_difference(chosen: Ints, rejected: Ints) -> tuple[int, int]:
    """Return the index of the first token that differs, once per side; (0, 0) if a side is empty."""
    return (shared_prefix((chosen, rejected)),) * 2 if len(chosen) and len(rejected) else (0, 0)


def _split_shared_turns(preference: Preference) -> Preference:
    """Make the turns that both conversations start with the prompt, unless there is one already."""
    chosen, rejected = preference.chosen, preference.rejected
    if preference.prompt is not None or isinstance(chosen, str) or isinstance(rejected, str):
        return preference
    most = min(len(chosen), len(rejected)) - 1
    same = next((k for k in range(most) if chosen[k] != rejected[k]), most)
    return preference._replace(prompt=chosen[:same], completions=(chosen[same:], rejected[same:]))


def _arrays(
    chosen: Sequence[Ints | None],
    rejected: Sequence[Ints | None],
    margins: Sequence[float],
    notes: Notes,
) -> Arrays:
    return {
        **flatten("chosen", chosen),
        **flatten("rejected", rejected),
        "margin": np.array(margins, np.float64),
        **notes.arrays(),
    }


def read_token_ids(table: Table, column: str, tokenizer: Any, problems: Problems) -> list[Ints]:
    """Read a column of token ids as int32 [n] per row, without the padding that its attention mask marks.

    Prompt ids (`prompt_ids`, `prompt_input_ids`, `input_ids_prompt`) are put in front.
    Invalid rows are added to `problems` and returned empty.
    """
    mask = _first_present(table, MASK_NAMES, "chosen" if "chosen" in column else "rejected")
    prompts = read_prompt_ids(table, tokenizer, problems)
    ids = _read_column(table, column, mask, tokenizer, problems)
    return ids if prompts is None else [np.concatenate(parts) for parts in zip(prompts, ids, strict=True)]


def read_prompt_ids(table: Table, tokenizer: Any, problems: Problems) -> list[Ints] | None:
    """Read the column of prompt ids as `read_token_ids` does; None if there is none."""
    prompt, mask = (_first_present(table, names, "prompt") for names in (ID_NAMES, MASK_NAMES))
    return None if prompt is None else _read_column(table, prompt, mask, tokenizer, problems)


def _read_column(
    table: Table, column: str, mask: str | None, tokenizer: Any, problems: Problems
) -> list[Ints]:
    vocabulary = len(tokenizer) if tokenizer is not None else None
    return [
        _read_ids(row, column, mask, vocabulary, table.where(i), problems) for i, row in enumerate(table.rows)
    ]


def _first_present(table: Table, names: Sequence[str], of: str) -> str | None:
    return next((name for each in names if (name := each.format(of)) in table.columns), None)


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
        problems.add(f"{place}: '{column}' holds {bad}, which is not a token id{known}{hint}")
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
