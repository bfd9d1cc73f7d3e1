"""Preference pairs from every layout they are published in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import Arrays, Tokens, flat, ragged
from rlhf_core.data.notes import Notes
from rlhf_core.data.parsing import FAMILIES as FAMILIES
from rlhf_core.data.parsing import Preference, margin_of, parse
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Records, Source
from rlhf_core.data.tokens import Seen, combined, digest64, digest_ids, pretokenised, prompt_ids
from rlhf_core.encoding import Encoder, Ints, TextOptions, first_after, join
from rlhf_core.errors import InputError
from rlhf_core.rows import Tree, shared_prefix, tree

NOTES = ("doubled", "after_reply", "left_out")


class Pair(NamedTuple):
    """One preference, prompt included."""

    chosen: Ints
    """int32 [n]."""
    rejected: Ints
    """int32 [m]."""
    margin: float
    """Reward units; 0 where the data has none."""
    starts: tuple[int, int] | None = None
    """Index of the first completion token of chosen and of rejected; None where it was not asked for."""


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
        """Each pair as [prompt | chosen | rejected]; `margin` is the value of both sequences.

        Where completions were asked for, their tokens have weight 1, those of prompts 0.
        """
        return [
            tree(pair[:2], _weights(pair), sequence_values={"margin": np.full(2, pair.margin, np.float32)})
            for pair in self.pairs
        ]

    @property
    def fingerprint(self) -> str:
        """Of what is trained on: tokens and margins, in order, and where completions start."""
        margins = np.array([pair.margin for pair in self.pairs], np.float64)
        starts = np.array([pair.starts for pair in self.pairs if pair.starts is not None], np.int64)
        return digest_ids([ids for pair in self.pairs for ids in pair[:2]], margins, starts)

    def row_digests(self) -> NDArray[np.uint64]:
        """uint64 [pairs]: of what is trained on in each row: its tokens, its margin and where completions start."""
        sides = np.array([[digest64(ids) for ids in pair[:2]] for pair in self.pairs], np.uint64)
        margins = np.array([pair.margin for pair in self.pairs], np.float64)
        starts = [pair.starts for pair in self.pairs if pair.starts is not None]
        return combined(sides, margins, *([np.array(starts, np.int64)] if starts else []))


def _weights(pair: Pair) -> list[NDArray[np.float32]] | None:
    if pair.starts is None:
        return None
    return [
        (np.arange(len(ids)) >= start).astype(np.float32)
        for ids, start in zip(pair[:2], pair.starts, strict=True)
    ]


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
    cells.check_overlong(overlong)
    report = Report("pairs", max_length)
    encoder = None if tokenizer is None else Encoder(tokenizer, chat_template)
    tokens, seen = Tokens("completions" if completions else "pairs", encoder), Seen(report, tokenizer)
    pairs: list[Pair] = []
    places: list[str] = []
    lengths: list[int] = []
    for source in records.sources:
        encoded = tokens.of(source, partial(_encode, source, encoder, completions))
        sides = zip(ragged(encoded, "chosen"), ragged(encoded, "rejected"), strict=True)
        margins, notes = encoded["margin"].tolist(), Notes.of(encoded, NOTES)
        named = [name for name in ("prompt", "chosen", "rejected") if name in source.columns]
        untemplated = "chosen" in named and cells.skips_template(source, encoder, *named)
        starts = map(tuple, encoded["starts"].tolist()) if completions else repeat(None)
        report.total += len(margins)
        for i, ((chosen, rejected), begin) in enumerate(zip(sides, starts, strict=False)):
            place = source.where(i)
            pair = Pair(chosen, rejected, margins[i], begin)
            if not _is_answered(pair):
                report.empty.append(place)
                continue
            lengths.append(longest := max(len(chosen), len(rejected)))
            identical = np.array_equal(chosen, rejected)
            if max_length is not None and longest > max_length:
                if overlong == "filter":
                    report.filtered.append(place)
                    continue
                pair = _cut(pair, max_length, truncation_mode)
                if not _is_answered(pair):
                    report.filtered.append(place)
                    continue
                report.truncated.append(place)
                if not identical and np.array_equal(pair.chosen, pair.rejected):
                    report.alike_once_cut.append(place)
            if identical:
                report.identical.append(place)
            notes.tell(i, place, report)
            report.untemplated += [place] * untemplated
            seen.note(place, pair.chosen, pair.rejected)
            pairs.append(pair)
            places.append(place)
    report.kept = len(pairs)
    report.require_some(records.name, lengths, "max_sequence_length")
    return Pairs(pairs, report, places)


def _is_answered(pair: Pair) -> bool:
    """Whether both sides have a token, and one of a completion that another token predicts where those count."""
    firsts = (0, 0) if pair.starts is None else (max(start, 1) for start in pair.starts)
    return all(len(ids) > first for ids, first in zip(pair[:2], firsts, strict=True))


def _cut(pair: Pair, limit: int, mode: str) -> Pair:
    """The pair with sides of at most `limit` tokens."""
    chosen, rejected = (cells.cut(ids, limit, mode) for ids in pair[:2])
    cut = pair._replace(chosen=chosen, rejected=rejected)
    if pair.starts is None or mode == "keep_start":
        return cut
    a, b = (
        max(start - len(ids) + len(kept), 0)
        for start, ids, kept in zip(pair.starts, pair[:2], cut[:2], strict=True)
    )
    return cut._replace(starts=(a, b))


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
