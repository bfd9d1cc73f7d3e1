"""Preference pairs from every layout they are published in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.data import conversations as cells
from rlhf_core.data.records import Records, Source
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.tokens import digest_ids, pretokenised
from rlhf_core.encoding import Encoder, Ints, Turns, join
from rlhf_core.errors import InputError
from rlhf_core.rows import Tree, tree

ACCEPTED = (
    "prompt + chosen + rejected, or chosen + rejected, as texts or conversations; or token ids: "
    "input_ids_chosen + input_ids_rejected, chosen_ids + rejected_ids, chosen_input_ids + rejected_input_ids"
)
FAMILIES = (
    ("input_ids_chosen", "input_ids_rejected"),
    ("chosen_ids", "rejected_ids"),
    ("chosen_input_ids", "rejected_input_ids"),
)


class Pair(NamedTuple):
    """One preference, prompt included."""

    chosen: Ints
    """int32 [n]."""
    rejected: Ints
    """int32 [m]."""
    margin: float
    """Reward units; 0 where the data has none."""


@dataclass(frozen=True)
class Pairs:
    """Encoded preferences."""

    pairs: list[Pair]
    report: Report
    places: list[str]
    """Where each pair comes from, such as "prefs.jsonl row 17"."""

    def __len__(self) -> int:
        return len(self.pairs)

    def where(self, i: int) -> str:
        return self.places[i]

    def trees(self) -> list[Tree]:
        """Each pair as [prompt | chosen | rejected]; `margin` is the value of both sequences."""
        return [
            tree((chosen, rejected), sequence_values={"margin": np.full(2, margin, np.float32)})
            for chosen, rejected, margin in self.pairs
        ]

    @property
    def fingerprint(self) -> str:
        """Of what is trained on: tokens and margins, in order."""
        margins = np.array([pair.margin for pair in self.pairs], np.float64)
        return digest_ids([ids for pair in self.pairs for ids in pair[:2]], margins)


def encode_pairs(
    records: Records,
    tokenizer: Any,
    *,
    max_length: int | None,
    overlong: str = "filter",
    truncation_mode: str = "keep_end",
    chat_template: str | None = None,
) -> Pairs:
    """Tokenise preferences; the columns decide how they are read, and every row is checked.

    tokenizer: may be None where all rows hold token ids; those are taken as they are, without EOS.
    max_length: tokens of either sequence, prompt included.
    overlong: "filter" drops a pair if one is longer, "truncate" cuts each sequence by `truncation_mode`.
    Raises InputError naming file and row of the first few problems, and where no pair is left.
    """
    cells.check_overlong(overlong)
    report = Report("pairs", max_length)
    pairs: list[Pair] = []
    places: list[str] = []
    lengths: list[int] = []
    for source in records.sources:
        encoded = _encode(source, tokenizer, chat_template)
        report.total += len(encoded)
        for i, pair in enumerate(encoded):
            place = source.where(i)
            if pair is None:
                report.empty.append(place)
                continue
            longest = max(len(pair.chosen), len(pair.rejected))
            lengths.append(longest)
            if max_length is not None and longest > max_length:
                if overlong == "filter":
                    report.filtered.append(place)
                    continue
                report.truncated.append(place)
                chosen, rejected = (cells.cut(ids, max_length, truncation_mode) for ids in pair[:2])
                pair = Pair(chosen, rejected, pair.margin)
            if np.array_equal(pair.chosen, pair.rejected):
                report.identical.append(place)
            pairs.append(pair)
            places.append(place)
    report.kept = len(pairs)
    report.require_some(records.name, lengths, "max_sequence_length")
    return Pairs(pairs, report, places)


def _encode(source: Source, tokenizer: Any, chat_template: str | None) -> list[Pair | None]:
    """A pair for every row, None where a completion is empty."""
    columns = source.columns
    problems = Problems()
    margins = [_margin(row, source.where(i), problems) for i, row in enumerate(source.rows)]
    for family in FAMILIES:
        if set(family) <= set(columns):
            sides = [pretokenised(source, name, tokenizer, problems) for name in family]
            problems.stop()
            return [
                Pair(c, r, m) if len(c) and len(r) else None for c, r, m in zip(*sides, margins, strict=True)
            ]
    preferences = parse(source, problems)
    problems.stop()
    if tokenizer is None:
        raise InputError(f"{source.name} has text, which needs a tokenizer")
    encoder = Encoder(tokenizer, chat_template)
    if not all(isinstance(p.chosen, str) for p in preferences):
        cells.require_template(source, encoder)
    texts: list[tuple[str, bool]] = []
    used: list[int] = []
    for i, p in enumerate(preferences):
        if cells.is_blank(p.chosen) or cells.is_blank(p.rejected):
            continue
        try:
            tools = source.rows[i].get("tools")
            texts += [encoder.text(join(p.prompt, side), tools=tools) for side in (p.chosen, p.rejected)]
            used.append(i)
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
    problems.stop()
    ids = [encoder.ended(sequence) for sequence in encoder.tokenize(texts)]
    pairs: list[Pair | None] = [None] * len(preferences)
    for i, chosen, rejected in zip(used, ids[0::2], ids[1::2], strict=True):
        pairs[i] = Pair(chosen, rejected, margins[i])
    return pairs


def _margin(row: Mapping[str, Any], place: str, problems: Problems) -> float:
    value = row.get("margin")
    if value is None or value == "":
        return 0.0
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        problems.add(f"{place}: 'margin' is {value!r}, not a finite number")
    return number


class Preference(NamedTuple):
    """A preference before tokenisation."""

    prompt: Turns | None
    """None: both sides hold it themselves."""
    chosen: Turns
    rejected: Turns


def parse(source: Source, problems: Problems) -> list[Preference]:
    """Prompt and completions of every row; rows that are wrong are added to `problems` and left out."""
    columns = set(source.columns)
    if not {"chosen", "rejected"} <= columns:
        raise cells.missing(source, ("chosen", "rejected"), ACCEPTED)
    names = [name for name in ("prompt", "chosen", "rejected") if name in columns]
    chat = {name: cells.is_chat(source, name) for name in names}
    if chat["chosen"] != chat["rejected"]:
        raise InputError(
            f"{source.where(0)}: one of 'chosen' and 'rejected' is a conversation, the other is not"
        )
    whole: list[Mapping[str, Any]] = []
    index: list[int] = []
    for i, row in enumerate(source.rows):
        found = [p for p in (cells.cell_problem(row, name, chat[name]) for name in names) if p]
        for problem in found:
            problems.add(f"{source.where(i)}: {problem}")
        if not found:
            whole.append(row)
            index.append(i)
    if "prompt" not in columns:
        return [Preference(None, row["chosen"], row["rejected"]) for row in whole]
    if not chat["prompt"] and not chat["chosen"]:
        return _texts(source, whole, index, problems)
    parsed = []
    for i, row in zip(index, whole, strict=True):
        sides = [_completion(row["prompt"], row[name], name) for name in ("chosen", "rejected")]
        fine = [side for side in sides if not isinstance(side, _Misfit)]
        for side in sides:
            if isinstance(side, _Misfit):
                problems.add(f"{source.where(i)}: {side.problem}")
        if len(fine) == 2 and fine[0][0] != fine[1][0]:
            problems.add(f"{source.where(i)}: 'chosen' and 'rejected' have different turns before the answer")
        elif len(fine) == 2:
            parsed.append(Preference(*fine[0], fine[1][1]))
    return parsed


def _texts(
    source: Source, rows: Sequence[Mapping[str, Any]], index: Sequence[int], problems: Problems
) -> list[Preference]:
    """Texts with a prompt: completions or, where most rows of a file do so, whole texts starting with it."""
    starts = [
        bool(row["prompt"])
        and row["chosen"].startswith(row["prompt"])
        and row["rejected"].startswith(row["prompt"])
        for row in rows
    ]
    repeated = sum(starts) * 2 > len(rows)
    if not repeated:
        return [Preference(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
    for i, row, start in zip(index, rows, starts, strict=True):
        if not start:
            side = "chosen" if not row["chosen"].startswith(row["prompt"]) else "rejected"
            problems.add(
                f"{source.where(i)}: 'prompt' is not the start of '{side}', as it is in most rows of the file"
            )
    return [
        Preference(row["prompt"], row["chosen"][len(row["prompt"]) :], row["rejected"][len(row["prompt"]) :])
        for row in rows
    ]


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
