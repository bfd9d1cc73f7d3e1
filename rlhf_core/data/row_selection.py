"""Select the rows of a source to use, and cut them, on arrays that cover all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import ENDS, NAMES, ROWS
from rlhf_core.data.ragged_arrays import Ragged
from rlhf_core.data.report import Report
from rlhf_core.data.source import Places, Records, Source
from rlhf_core.data.token_ids import digest64, record_repeats, shared_start
from rlhf_core.errors import InputError
from rlhf_core.tokenizer.encoding import Encoder, Message, Turns

FIELDS = "ignored_fields"


class Selection:
    """The rows of one source to use; at first all of them."""

    def __init__(
        self,
        source: Source,
        offset: int,
        arrays: Mapping[str, NDArray[Any]],
        names: Sequence[str],
        report: Report,
    ) -> None:
        """offset: index of the source's first row in the records. names: the sequences in `arrays`, which also has
        their `sequence_facts`.
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
        """int64 [rows]: tokens of each row's longest sequence."""
        return np.max([self.lengths(name) for name in self.names], axis=0)

    def overlong(self, limit: int | None) -> NDArray[np.bool_]:
        """Mark used rows with a sequence of more than `limit` tokens, bool [rows]."""
        return self.used & (self.longest > limit) if limit is not None else np.zeros(self.count, np.bool_)

    def drop(self, which: NDArray[np.bool_], places: list[str]) -> None:
        """Stop using these rows and add their names to a list of the report."""
        which = which & self.used
        self.used &= ~which
        self.record(which, places)

    def record(self, which: NDArray[np.bool_], places: list[str]) -> None:
        """Add the names of these rows to a list of the report."""
        places += [self.source.where(i) for i in np.flatnonzero(which).tolist()]

    def cut(self, limit: int, mode: str) -> dict[str, NDArray[np.int64]]:
        """Cut the sequences to their last ("keep_end") or first ("keep_start") `limit` tokens.

        Returns how many tokens each sequence lost at its start, by name.
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

    def update_facts(self, which: NDArray[np.bool_], unknown: int | None) -> None:
        """Recompute the facts of rows that were cut."""
        for i in np.flatnonzero(which & self.used).tolist():
            sequences = [self.sequence(name, i) for name in self.names]
            self.digests[i] = [digest64(ids) for ids in sequences]
            self.unknown[i] = unknown is not None and any((ids == unknown).any() for ids in sequences)
            if self.shared is not None:
                self.shared[i] = shared_start(sequences[0], sequences[1])

    def sequence(self, name: str, i: int) -> NDArray[Any]:
        ids: NDArray[Any] = self.arrays[name][self.starts[name][i] : self.stops[name][i]]
        return ids

    def record_notes(self, names: Sequence[str]) -> None:
        """Add used rows with notes, and those with unknown tokens, to the report's lists."""
        for name in names:
            rows = self.arrays[f"{name}{ROWS}"]
            getattr(self.report, name).extend(self.source.where(i) for i in rows[self.used[rows]].tolist())
        self.record(self.unknown & self.used, self.report.unknown)
        fields = zip(self.arrays[FIELDS + ROWS].tolist(), self.arrays[FIELDS + NAMES].tolist(), strict=True)
        for i, name in fields:
            if self.used[i]:
                self.report.add_ignored_field(self.source.where(i), name.decode(errors="replace"))

    @property
    def index(self) -> NDArray[np.int64]:
        """int64: indices of the used rows."""
        return np.flatnonzero(self.used)


def used_sequences(selections: Sequence[Selection], name: str, array: str | None = None) -> Ragged:
    """Gather the sequences `name` of the used rows, from another array of the same layout if `array` is given."""
    return Ragged.joined(
        [
            (rows.arrays[array or name], rows.starts[name][rows.used], rows.stops[name][rows.used])
            for rows in selections
        ]
    )


def used_values(selections: Sequence[Selection], values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate the used rows' values. values: [rows] per selection."""
    return np.concatenate([value[rows.used] for rows, value in zip(selections, values, strict=True)])


def finish(
    records: Records, selections: Sequence[Selection], lengths: Sequence[NDArray[np.int64]], setting: str
) -> tuple[Places, NDArray[np.uint64]]:
    """Complete the report, and return the names of the used rows and the digests of their sequences.

    lengths: tokens of the rows that are not empty. setting: the option that sets the limit, for the InputError that is
    raised if no row is used.
    """
    report = selections[0].report
    rows = np.concatenate([selection.index + selection.offset for selection in selections])
    places = Places(records, rows)
    digests = used_values(selections, [selection.digests for selection in selections])
    record_repeats(report, digests, places)
    report.kept = len(rows)
    report.require_some(records.name, np.concatenate(lengths), setting)
    return places, digests


def list_unread_columns(report: Report, records: Records, read: Callable[[Source], Iterable[str]]) -> None:
    """Add the columns to the report that `read` does not return for a source, with how many rows have them."""
    counts: dict[str, int] = {}
    for source in records.sources:
        used = set(read(source))
        for name in source.columns:
            if name not in used and (count := source.kind(name).total):
                counts[name] = counts.get(name, 0) + count
    if counts:
        listed = ", ".join(f"{name} (in {count:,})" for name, count in counts.items())
        report.not_read.append(f"columns that are not read: {listed}")


def check_options(overlong: str, truncation_mode: str) -> None:
    """Raise InputError for unknown values of the two options."""
    if overlong not in ("filter", "truncate"):
        raise InputError(f"overlong '{overlong}' is neither filter nor truncate")
    if truncation_mode not in ("keep_end", "keep_start"):
        raise InputError(f"truncation_mode '{truncation_mode}' is neither keep_end nor keep_start")


class Notes:
    """Unusual rows of a source, by the name of the `Report` list they belong to."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rows: dict[str, set[int]] = {name: set() for name in names}
        self.fields: dict[tuple[int, str], None] = {}
        """(row, field of its messages that the chat template does not write)."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return {name + `ROWS`: int64 row indices}, and the names of ignored fields, at most 64 bytes each."""
        return {
            **{f"{name}{ROWS}": np.array(sorted(rows), np.int64) for name, rows in self.rows.items()},
            FIELDS + ROWS: np.array([row for row, _ in self.fields], np.int64),
            FIELDS + NAMES: np.array([name.encode() for _, name in self.fields], "S64"),
        }

    def record(self, source: Source, report: Report) -> None:
        """Add the rows of a source to the report's lists."""
        for name, rows in self.rows.items():
            getattr(report, name).extend(source.where(i) for i in sorted(rows))
        for i, name in self.fields:
            report.add_ignored_field(source.where(i), name)

    def add(self, name: str, i: int, applies: bool) -> None:
        if applies:
            self.rows[name].add(i)

    def write_judged(
        self, i: int, encoder: Encoder, turns: Turns, tools: Any, kwargs: Mapping[str, Any] | None = None
    ) -> tuple[str, bool]:
        """Return `Encoder.text` of row i's judged turns, noting turns and content that are left out."""
        judged = encoder.judged_turns(turns)
        text = encoder.text(judged, tools=tools, kwargs=kwargs)
        if not isinstance(judged, str):
            self.add("after_reply", i, len(judged) < len(turns))
            self.add_unwritten(i, encoder, judged, text[0], tools, kwargs)
        return text

    def add_unwritten(
        self,
        i: int,
        encoder: Encoder,
        turns: Sequence[Message],
        text: str,
        tools: Any,
        kwargs: Mapping[str, Any] | None,
        learns: bool = False,
    ) -> None:
        """Note what the text that the template wrote of row i's messages lacks. learns: as in `ignored_fields`."""
        self.add("left_out", i, encoder.chat.leaves_out(turns, text, tools))
        names = encoder.chat.ignored_fields(turns, text, tools=tools, kwargs=kwargs, learns=learns)
        self.fields |= dict.fromkeys((i, name) for name in names)
