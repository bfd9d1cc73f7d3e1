"""Preference pairs from every layout they are published in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.data import conversations as cells
from rlhf_core.data.cache import Arrays, Tokens, flat, ragged
from rlhf_core.data.parsing import FAMILIES as FAMILIES
from rlhf_core.data.parsing import margin_of, parse
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Records, Source
from rlhf_core.data.tokens import Seen, digest_ids, pretokenised
from rlhf_core.encoding import Encoder, Ints, join
from rlhf_core.errors import InputError
from rlhf_core.rows import Tree, tree


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
    encoder = None if tokenizer is None else Encoder(tokenizer, chat_template)
    tokens, seen = Tokens("pairs", encoder), Seen(report)
    pairs: list[Pair] = []
    places: list[str] = []
    lengths: list[int] = []
    for source in records.sources:
        encoded = tokens.of(source, partial(_encode, source, encoder))
        sides = zip(ragged(encoded, "chosen"), ragged(encoded, "rejected"), strict=True)
        margins, doubled = encoded["margin"].tolist(), set(encoded["doubled"].tolist())
        report.total += len(margins)
        for i, (chosen, rejected) in enumerate(sides):
            place = source.where(i)
            if not len(chosen) or not len(rejected):
                report.empty.append(place)
                continue
            lengths.append(longest := max(len(chosen), len(rejected)))
            identical = np.array_equal(chosen, rejected)
            if max_length is not None and longest > max_length:
                if overlong == "filter":
                    report.filtered.append(place)
                    continue
                report.truncated.append(place)
                chosen, rejected = (cells.cut(ids, max_length, truncation_mode) for ids in (chosen, rejected))
                if not identical and np.array_equal(chosen, rejected):
                    report.alike_once_cut.append(place)
            if identical:
                report.identical.append(place)
            if i in doubled:
                report.doubled.append(place)
            seen.note(place, chosen, rejected)
            pairs.append(Pair(chosen, rejected, margins[i]))
            places.append(place)
    report.kept = len(pairs)
    report.require_some(records.name, lengths, "max_sequence_length")
    return Pairs(pairs, report, places)


def _encode(source: Source, encoder: Encoder | None) -> Arrays:
    """Of every row chosen and rejected ids, none where its completion is empty, and margin; the doubled rows."""
    columns = source.columns
    problems = Problems()
    margins = [margin_of(row, source.where(i), problems) for i, row in enumerate(source.rows)]
    for family in FAMILIES:
        if set(family) <= set(columns):
            tokenizer = None if encoder is None else encoder.tokenizer
            given = [pretokenised(source, name, tokenizer, problems) for name in family]
            problems.stop()
            return _arrays(given[0], given[1], margins, doubled=[])
    preferences = parse(source, problems)
    problems.stop()
    if encoder is None:
        raise InputError(f"{source.name} has text, which needs a tokenizer")
    if not all(isinstance(p.chosen, str) for p in preferences):
        cells.require_template(source, encoder)
    texts: list[tuple[str, bool]] = []
    used: list[int] = []
    for i, p in enumerate(preferences):
        if cells.is_blank(p.chosen) or cells.is_blank(p.rejected):
            continue
        try:
            tools = cells.tools_of(source.rows[i])
            texts += [encoder.text(join(p.prompt, side), tools=tools) for side in (p.chosen, p.rejected)]
            used.append(i)
        except InputError as error:
            problems.add(f"{source.where(i)}: {error}")
    problems.stop()
    ids = [encoder.ended(sequence) for sequence in encoder.tokenize(texts)]
    chosen, rejected = (dict(zip(used, ids[side::2], strict=True)) for side in (0, 1))
    rows = range(len(preferences))
    doubled = [i for i in rows if preferences[i].doubled]
    return _arrays([chosen.get(i) for i in rows], [rejected.get(i) for i in rows], margins, doubled)


def _arrays(
    chosen: Sequence[Ints | None],
    rejected: Sequence[Ints | None],
    margins: Sequence[float],
    doubled: Sequence[int],
) -> Arrays:
    return {
        **flat("chosen", chosen),
        **flat("rejected", rejected),
        "margin": np.array(margins, np.float64),
        "doubled": np.array(doubled, np.int64),
    }
