"""Which rows of a source are used, and which part of each: on arrays of all rows, without an object for any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import ENDS, ROWS
from rlhf_core.data.ragged_arrays import Ragged
from rlhf_core.data.report import Report
from rlhf_core.data.source import Places, Records, Source
from rlhf_core.data.token_ids import digest64, note_repeats, shared_start
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, Turns


class Selection:
    """The rows of one source, all of which are used at first."""

    def __init__(
        self,
        source: Source,
        offset: int,
        arrays: Mapping[str, NDArray[Any]],
        names: Sequence[str],
        report: Report,
    ) -> None:
        """offset: the number of the source's first row among those of all sources. names: of the sequences in `arrays`,
        each of which has the facts of `tokens.facts`.
        """
        self.source, self.offset, self.arrays, self.names, self.report = source, offset, arrays, names, report
        self.stops = {name: np.array(arrays[f"{name}{ENDS}"], np.int64) for name in names}
        self.starts = {name: np.concatenate([[0], stops[:-1]]) for name, stops in self.stops.items()}
        self.count = len(self.stops[names[0]])
        self.used = np.ones(self.count, bool)
        self.digests = np.stack([arrays[f"{name}_digest"] for name in names], 1)
        self.unknown = np.array(arrays["unknown"])
        self.shared = np.array(arrays["shared"]) if "shared" in arrays else None
        report.total += self.count

    def __len__(self) -> int:
        return self.count

    def lengths(self, name: str) -> NDArray[np.int64]:
        return self.stops[name] - self.starts[name]

    @property
    def longest(self) -> NDArray[np.int64]:
        """[rows]: tokens of the longest sequence of each."""
        return np.max([self.lengths(name) for name in self.names], axis=0)

    def over(self, limit: int | None) -> NDArray[np.bool_]:
        """[rows]: those that are used and have a sequence of more tokens."""
        return self.used & (self.longest > limit) if limit is not None else np.zeros(self.count, np.bool_)

    def drop(self, which: NDArray[np.bool_], places: list[str]) -> None:
        """Use these rows no more, and add what they are called to a list of the report."""
        which = which & self.used
        self.used &= ~which
        self.tell(which, places)

    def tell(self, which: NDArray[np.bool_], places: list[str]) -> None:
        """Add what these rows are called, where they are used or just dropped, to a list of the report."""
        places += [self.source.where(i) for i in np.flatnonzero(which).tolist()]

    def cut(self, limit: int, mode: str) -> dict[str, NDArray[np.int64]]:
        """Shorten the sequences to `limit` tokens: the last ("keep_end") or the first ("keep_start").

        Returns how many tokens the start of each has lost, by name.
        """
        lost = {}
        for name in self.names:
            over = np.maximum(self.lengths(name) - limit, 0)
            if mode == "keep_end":
                self.starts[name] = self.starts[name] + over
            else:
                self.stops[name] = self.stops[name] - over
            lost[name] = over if mode == "keep_end" else np.zeros_like(over)
        return lost

    def reread(self, which: NDArray[np.bool_], unknown: int | None) -> None:
        """Find the facts of rows that were cut anew."""
        for i in np.flatnonzero(which & self.used).tolist():
            sequences = [self.sequence(name, i) for name in self.names]
            self.digests[i] = [digest64(ids) for ids in sequences]
            self.unknown[i] = unknown is not None and any((ids == unknown).any() for ids in sequences)
            if self.shared is not None:
                self.shared[i] = shared_start(sequences[0], sequences[1])

    def sequence(self, name: str, i: int) -> NDArray[Any]:
        found: NDArray[Any] = self.arrays[name][self.starts[name][i] : self.stops[name][i]]
        return found

    def tell_notes(self, names: Sequence[str]) -> None:
        """Add the rows that something was noted of, as far as they are used, to the report's lists."""
        for name in names:
            rows = self.arrays[f"{name}{ROWS}"]
            getattr(self.report, name).extend(self.source.where(i) for i in rows[self.used[rows]].tolist())
        self.tell(self.unknown & self.used, self.report.unknown)

    @property
    def index(self) -> NDArray[np.int64]:
        """The rows that are used."""
        return np.flatnonzero(self.used)


def sequences(selections: Sequence[Selection], name: str, of: str | None = None) -> Ragged:
    """Sequences NAME of the rows that are used; with `of`, of an array that lies as they do."""
    return Ragged.joined(
        [
            (each.arrays[of or name], each.starts[name][each.used], each.stops[name][each.used])
            for each in selections
        ]
    )


def together(selections: Sequence[Selection], values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Values, [rows] of each selection, of the rows that are used."""
    return np.concatenate([value[each.used] for each, value in zip(selections, values, strict=True)])


def finished(
    records: Records, selections: Sequence[Selection], lengths: Sequence[NDArray[np.int64]], setting: str
) -> tuple[Places, NDArray[np.uint64]]:
    """What the rows that are used are called, and digests of their sequences; the report is told of repeated rows.

    lengths: of the rows that are not empty. Raises InputError where no row is used; setting: the option that limits.
    """
    report = selections[0].report
    rows = np.concatenate([each.index + each.offset for each in selections])
    places = Places(records, rows)
    digests = together(selections, [each.digests for each in selections])
    note_repeats(report, digests, places)
    report.kept = len(rows)
    report.require_some(records.name, np.concatenate(lengths), setting)
    return places, digests


def check(overlong: str, truncation_mode: str) -> None:
    """Raise InputError for unknown ways to treat what is too long."""
    if overlong not in ("filter", "truncate"):
        raise InputError(f"overlong '{overlong}' is neither filter nor truncate")
    if truncation_mode not in ("keep_end", "keep_start"):
        raise InputError(f"truncation_mode '{truncation_mode}' is neither keep_end nor keep_start")


class Notes:
    """Rows of a source by the name of the `Report` list they belong to."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rows: dict[str, set[int]] = {name: set() for name in names}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """int64 row numbers by name and `ROWS`."""
        return {f"{name}{ROWS}": np.array(sorted(rows), np.int64) for name, rows in self.rows.items()}

    def add(self, name: str, i: int, applies: bool) -> None:
        if applies:
            self.rows[name].add(i)

    def written(
        self, i: int, encoder: Encoder, turns: Turns, tools: Any, kwargs: Mapping[str, Any] | None = None
    ) -> tuple[str, bool]:
        """As `Encoder.text`, of a text, or of what of row i's conversation is judged."""
        kept = encoder.judged(turns)
        text = encoder.text(kept, tools=tools, kwargs=kwargs)
        if not isinstance(kept, str):
            self.add("after_reply", i, len(kept) < len(turns))
            self.add("left_out", i, encoder.chat.leaves_out(kept, text[0], tools))
        return text
