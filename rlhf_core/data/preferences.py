"""Preference pairs, from the layouts they are published in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rlhf_core.data.columns as cells
from rlhf_core.data.best_of_n import list_problem, mixture
from rlhf_core.data.cache import Arrays, flatten
from rlhf_core.data.columns import COLUMNS, ID_NAMES, MASK_NAMES
from rlhf_core.data.examples import Examples, Limit, RowKind, encode, shared_start
from rlhf_core.data.parts import (
    Notes,
    Parser,
    Parts,
    Row,
    encode_completions,
    for_each,
    parse_rows,
    raise_problems,
    read_numbers,
    strip_prompt,
)
from rlhf_core.data.report import Problems
from rlhf_core.data.table import Records, Table
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, Ints, TextOptions, Turns, first_after

ACCEPTED = (
    "prompt + chosen + rejected, or chosen + rejected, as texts or conversations; or token ids: "
    "input_ids_chosen + input_ids_rejected, chosen_ids + rejected_ids, chosen_input_ids + rejected_input_ids"
)
FORMATS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
FAMILIES = tuple((name.format("chosen"), name.format("rejected")) for name in ID_NAMES)
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
    margins: bool = True,
    part: bool = False,
) -> Examples:
    """Tokenise preferences, reading them by their columns and checking every row.

    tokenizer: may be None if all rows hold token ids; those are used unchanged, without EOS.
    max_length: tokens of either sequence, prompt included.
    chat_template: as in `template_text`, or all options as `TextOptions`.
    overlong: "filter" drops a pair if either sequence is too long, "truncate" cuts each by `truncation_mode`.
    completions: find where they start (`Examples.starts`): after the prompt; without one, after the turns that both
        conversations share, or where texts or ids differ. A pair whose completions are cut away is dropped.
    margins: whether the caller reads them; if not, the report lists the pairs that have one. part: as in
        `examples.encode`.
    Raises InputError naming file and row of the first few problems, and if no pair is left.
    """
    encoder = None if tokenizer is None else Encoder.of(tokenizer, chat_template)
    kind = RowKind(
        "pairs",
        "completions" if completions else "pairs",
        SIDES,
        2,
        NOTES,
        partial(_encode, encoder=encoder, completions=completions),
        partial(used_columns, margins=margins),
        {"margin": 0.0},
    )
    pairs = encode(records, encoder, kind, Limit(max_length, overlong, truncation_mode), part=part)
    if not margins:
        pairs.report.unread += [pairs.where(i) for i in np.flatnonzero(pairs.values["margin"]).tolist()]
    return pairs


def usable_pairs(table: Table, options: TextOptions) -> NDArray[np.bool_]:
    """Check all rows as far as that needs no tokenizer; tell which could teach something, bool [rows].

    Raises InputError naming file and row of the first few problems.
    """
    problems = Problems()
    read_numbers(table, "margin", problems, 0.0)
    if id_columns(table) is not None:
        problems.raise_if_any()
        return np.ones(len(table.rows), bool)
    rows = parse_rows(table, pair_parser(table, options), problems)
    return np.array([row is not None and row.completions[0] != row.completions[1] for row in rows], bool)


def id_columns(table: Table) -> tuple[str, str] | None:
    """Return the columns of chosen and rejected token ids; None if the table has texts or conversations."""
    return next((family for family in FAMILIES if set(family) <= set(table.columns)), None)


def used_columns(table: Table, margins: bool) -> tuple[str, ...]:
    """List the columns that pairs and their evaluation are read from. margins: whether `margin` is one."""
    others = ("margin", "subset") if margins else ("subset",)
    if id_columns(table) is not None:
        return (*(name for name in COLUMNS if "ids" in name or "mask" in name), *others)
    texts = ("prompt", *SIDES)
    chat = any(cells.is_chat(table, name) for name in texts)
    return (*texts, *(cells.FOR_TEMPLATES if chat else ()), *others)


def pair_parser(
    table: Table,
    options: TextOptions,
    *,
    may_be_blank: bool = False,
    may_be_null: bool = False,
    lists: bool = False,
) -> Parser:
    """Make the parser of a table's pairs: rows with a prompt and its completions, those of `chosen` first.

    may_be_blank: otherwise a pair with a blank completion teaches nothing. may_be_null: a row without one is no error,
    but left out. lists: `chosen` and `rejected` hold lists of completions.
    """
    if not set(SIDES) <= set(table.columns):
        raise cells.missing_columns(table, SIDES, ACCEPTED, *FORMATS)
    names = [name for name in ("prompt", *SIDES) if name in table.columns]
    chat = {name: cells.is_chat(table, name) for name in names}
    if chat["chosen"] != chat["rejected"] and not lists:
        raise InputError(
            f"{table.where(0)}: one of 'chosen' and 'rejected' is a conversation, the other is not: make both "
            "texts or both lists of messages"
        )

    def read_pair(row: Row) -> list[tuple[str, Turns]]:
        """Check the cells of a row; return (column, completion) of both sides."""
        raise_problems([cells.cell_problem(row, name, chat[name]) for name in names])
        if chat["chosen"]:
            raise_problems([cells.unanswered_problem(row, name) for name in SIDES])
        return [(name, row[name]) for name in SIDES]

    def read_lists(row: Row) -> list[tuple[str, Turns]]:
        """Check the cells of a row; return (column, completion) of all completions of both sides."""
        problems = [list_problem(row, name) for name in SIDES]
        if "prompt" in names:
            problems.insert(0, cells.cell_problem(row, "prompt", chat["prompt"]))
        raise_problems(problems)
        raise_problems([mixture(row)])
        return [(name, completion) for name in SIDES for completion in row[name]]

    read_sides = read_lists if lists else read_pair

    def parse(row: Row) -> Parts | None:
        if may_be_null and any(name in row and row[name] is None for name in SIDES):
            return None
        sides = read_sides(row)
        parts = _split(row.get("prompt"), sides, options.prompt_repeated)
        if parts.has_blank and not may_be_blank:
            return None
        return parts.with_template_values(row)

    return parse


def _split(prompt: Turns | None, sides: Sequence[tuple[str, Turns]], repeated: bool | None) -> Parts:
    """Take the prompt from its completions. sides: (column, completion). Raises InputError where it is not theirs."""
    if prompt is None:
        return Parts(None, [side for _, side in sides])
    texts = [(name, side) for name, side in sides if isinstance(side, str)]
    if isinstance(prompt, str) and len(texts) == len(sides):
        return Parts(prompt, *strip_prompt(prompt, texts, repeated))
    prompts: list[Turns] = []
    completions: list[Turns] = []
    problems: list[str] = []
    for name, side in sides:
        found = split_prompt(prompt, side, name)
        if isinstance(found, tuple):
            prompts.append(found[0])
            completions.append(found[1])
        elif found not in problems:
            problems.append(found)
    raise_problems(problems)
    before = prompts[0]
    if any(other != before for other in prompts):
        named = "'chosen' and 'rejected'" if len(sides) == 2 else "the completions"
        raise InputError(f"{named} have different turns before the answer")
    return Parts(before, completions)


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


def _encode(
    table: Table, notes: Notes, problems: Problems, *, encoder: Encoder | None, completions: bool
) -> Arrays:
    """Encode every row's chosen and rejected ids; none if a completion is blank.

    completions: add "starts", int64 [rows, 2], where the completions start.
    """
    if id_columns(table) is not None:
        return _id_arrays(
            read_ids(table, None if encoder is None else encoder.tokenizer, problems), completions
        )
    options = TextOptions() if encoder is None else encoder.options
    rows = parse_rows(table, pair_parser(table, options), problems)
    if encoder is None:
        raise InputError(f"{table.name} has text, which needs a tokenizer")
    for i, parts in enumerate(rows):
        notes.add("doubled", i, parts is not None and parts.doubled)
    pairs = encode_completions(table, rows, encoder, notes)
    arrays = _arrays(pairs)
    if completions:
        arrays["starts"] = _starts(table, rows, pairs, encoder)
    return arrays


def _arrays(pairs: Sequence[Sequence[Ints] | None]) -> Arrays:
    sides = [[None if pair is None else pair[side] for pair in pairs] for side in (0, 1)]
    return {**flatten("chosen", sides[0]), **flatten("rejected", sides[1])}


def _starts(
    table: Table, rows: Sequence[Parts | None], pairs: Sequence[Sequence[Ints] | None], encoder: Encoder
) -> NDArray[np.int64]:
    """Find the first token of every completion, int64 [rows, 2]."""
    used: list[int] = []
    openings: list[tuple[str, bool]] = []
    starts = np.zeros((len(rows), 2), np.int64)

    def write(i: int, parts: Parts) -> None:
        prompt, completion = _shared_turns(parts)
        if prompt is None:
            chosen, rejected = pairs[i] or ()
            starts[i] = shared_start(chosen, rejected)
            return
        openings.append(encoder.prompt_text(prompt, completion, tools=parts.tools, kwargs=parts.kwargs))
        used.append(i)

    for_each(table, rows, encoder, write)
    for i, before in zip(used, encoder.tokenize_open(openings), strict=True):
        starts[i] = [first_after(before, ids) for ids in pairs[i] or ()]
    return starts


def _shared_turns(pair: Parts) -> tuple[Turns | None, Turns]:
    """Return the prompt and the chosen completion; without a prompt, the turns that both conversations start with."""
    chosen, rejected = pair.completions
    if pair.prompt is not None or isinstance(chosen, str) or isinstance(rejected, str):
        return pair.prompt, chosen
    most = min(len(chosen), len(rejected)) - 1
    same = next((k for k in range(most) if chosen[k] != rejected[k]), most)
    return chosen[:same], chosen[same:]


def _id_arrays(rows: Sequence[IdPair], completions: bool) -> Arrays:
    arrays = _arrays([[chosen, rejected] for _, chosen, rejected in rows])
    if completions:
        arrays["starts"] = np.array(
            [[shared_start(a, b) if n is None else n] * 2 for n, a, b in rows], np.int64
        ).reshape(-1, 2)
    return arrays


IdPair = tuple[int | None, Ints, Ints]
"""How many ids the prompt has, None without one, and the ids of chosen and rejected, with the prompt's."""


def read_ids(table: Table, tokenizer: Any, problems: Problems) -> list[IdPair]:
    """Read the columns of token ids, int32 [n] each, without the padding that their attention masks mark.

    Prompt ids (`prompt_ids`, `prompt_input_ids`, `input_ids_prompt`) are put in front.
    Raises InputError naming file and row of the first few problems, `problems` included.
    """
    columns = dict(zip(SIDES, id_columns(table) or (), strict=True))
    prompt = _first_present(table, ID_NAMES, "prompt")
    if prompt is not None:
        columns = {"prompt": prompt, **columns}
    masks = {name: _first_present(table, MASK_NAMES, name) for name in columns}
    vocabulary = None if tokenizer is None else len(tokenizer)
    pairs: list[IdPair] = []
    for i, row in enumerate(table.rows):
        try:
            ids = {name: _read_ids(row, columns[name], masks[name], vocabulary) for name in columns}
        except InputError as error:
            problems.add(f"{table.where(i)}: {error}")
            continue
        before = ids.get("prompt")
        if before is None:
            pairs.append((None, ids["chosen"], ids["rejected"]))
        else:
            chosen, rejected = (np.concatenate([before, ids[name]]) for name in SIDES)
            pairs.append((len(before), chosen, rejected))
    problems.raise_if_any()
    return pairs


def _first_present(table: Table, names: Sequence[str], of: str) -> str | None:
    return next((name for each in names if (name := each.format(of)) in table.columns), None)


def _read_ids(row: Row, column: str, mask: str | None, vocabulary: int | None) -> Ints:
    """Read the ids of a cell. Raises InputError for what is wrong with it or its mask."""
    ids = _read_integers(row, column)
    if len(ids) and (ids.min() < 0 or (vocabulary is not None and ids.max() >= vocabulary)):
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        known = "" if vocabulary is None else f" of the tokenizer (0 to {vocabulary - 1})"
        hint = "; mark padding in the attention mask" if bad < 0 else ""
        raise InputError(f"'{column}' holds {bad}, which is not a token id{known}{hint}")
    if mask is not None:
        seen = _read_integers(row, mask)
        if len(seen) != len(ids):
            raise InputError(f"'{mask}' has {len(seen)} elements, '{column}' has {len(ids)}")
        ids = ids[seen != 0]
    return ids.astype(np.int32)


def _read_integers(row: Row, column: str) -> NDArray[np.int64]:
    if row.get(column) is None:
        missing = "missing, which other rows of the file have"
        raise InputError(f"'{column}' is {'null' if column in row else missing}")
    try:
        values = np.asarray(row[column])
    except ValueError:  # lists of different lengths
        values = np.asarray(None)
    if values.size == 0 and values.ndim == 1:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise InputError(f"'{column}' is not a list of integers")
    return values.astype(np.int64)
