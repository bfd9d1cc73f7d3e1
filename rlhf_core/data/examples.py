"""Encoded data: rows of any kind as token ids in flat arrays, each made a tree on access, and which rows are used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import (
    ENDS,
    NAMES,
    ROWS,
    Arrays,
    Ragged,
    TokenCache,
    combine_digests,
    digest64,
    unknown_id,
)
from rlhf_core.data.columns import describe_columns, is_chat, skips_template
from rlhf_core.data.parts import FIELDS, Notes, read_number, read_numbers, refuse_repeats
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.table import CONVERSATIONS, Records, Table
from rlhf_core.errors import InputError
from rlhf_core.packing.rows import Tree, shared_prefix
from rlhf_core.packing.trees import Trees
from rlhf_core.tokenizer.encoding import Encoder, Ints, Turns


class Limit(NamedTuple):
    """What happens to long rows."""

    tokens: int | None
    """Maximum of each sequence of a row; None: no limit."""
    overlong: str
    """"filter" drops longer rows, "truncate" cuts them."""
    truncation_mode: str
    """Which end is kept: "keep_end" or "keep_start"."""
    setting: str = "max_sequence_length"
    """The option that sets `tokens`."""

    def check(self) -> None:
        """Raise InputError for unknown values."""
        if self.overlong not in ("filter", "truncate"):
            raise InputError(f"overlong '{self.overlong}' is neither filter nor truncate")
        if self.truncation_mode not in ("keep_end", "keep_start"):
            raise InputError(f"truncation_mode '{self.truncation_mode}' is neither keep_end nor keep_start")


@dataclass(frozen=True)
class Kind:
    """What makes rows pairs, texts or prompts: their columns, and how a row becomes sequences."""

    unit: str
    """Plural noun for rows, such as "pairs"."""
    cached_as: str
    """Tells the arrays of `encode` from others of the same rows."""
    sequences: tuple[str, ...]
    """The sequences of a row."""
    branches: int
    """Sequences that are trained on; 0: the only one is a prompt."""
    notes: tuple[str, ...]
    """Lists of `Report` for unusual rows that are kept."""
    encode: Callable[[Table, Notes, Problems], Arrays]
    """Tokenises the rows of a table: {sequence: `flatten` of them}, none of a row with nothing to learn; perhaps also
    `starts`, int64 [rows, sequences], the index of each completion's first token, or `learned`, shaped like the only
    sequence. Problems of the rows' numbers are known already."""
    columns: Callable[[Table], Sequence[str]]
    """The columns of a table that rows are read from."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    """{column of numbers: as `missing` of `read_numbers`}; they become values of trees."""
    passes_others: bool = False
    """Whether the other columns are used too: by reward functions."""


VALUE = "value_{}"
"""Name of the array with column n of `Kind.numbers`."""
REASONS = ("", "empty", "identical", "filtered", "alike_once_cut")
"""Why a row is dropped, as the list of `Report` is called; the first is of rows that are used."""


class Selection:
    """Which rows of a table are used, and where their sequences are cut."""

    def __init__(self, table: Table, arrays: Arrays, names: Sequence[str]) -> None:
        """arrays: of `Kind.encode`, with their `sequence_facts`. names: the sequences in them."""
        self.table, self.arrays, self.names = table, arrays, names
        self.stops: NDArray[np.int64] = np.stack([arrays[f"{name}{ENDS}"] for name in names], 1)
        """[rows, sequences]: their bounds in the flat arrays."""
        self.starts = np.concatenate([np.zeros((1, len(names)), np.int64), self.stops[:-1]])
        self.longest = self.lengths.max(1)
        """int64 [rows]: tokens of each row's longest sequence, before it is cut."""
        self.firsts: NDArray[np.int64] | None = arrays.get("starts")
        """[rows, sequences]: index of each completion's first token."""
        self.digests = np.stack([arrays[f"{name}_digest"] for name in names], 1)
        self.unknown = np.array(arrays["unknown"])
        self.shared = np.array(arrays["shared"]) if "shared" in arrays else None
        self.why = np.zeros(len(self.stops), np.int8)
        """Index of each row's reason in `REASONS`."""
        self.cut = np.zeros(len(self.stops), bool)
        """Whether a row that is used lost tokens."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [rows, sequences]: tokens of each sequence."""
        return self.stops - self.starts

    @property
    def used(self) -> NDArray[np.bool_]:
        return self.why == 0

    @property
    def trainable(self) -> NDArray[np.bool_]:
        """bool [rows]: whether there is something to train on in every sequence."""
        if "learned" in self.arrays:
            return self.ragged("tokens", "learned").counts() > 0
        least = 0 if self.firsts is None else np.maximum(self.firsts, 1)
        return np.asarray((self.lengths > least).all(1))

    @property
    def alike(self) -> NDArray[np.bool_]:
        """bool [rows]: whether a row's two sequences are the same tokens; false for rows of one sequence."""
        if len(self.names) < 2:
            return np.zeros(len(self.why), bool)
        lengths = self.lengths
        return np.asarray((self.digests[:, 0] == self.digests[:, 1]) & (lengths[:, 0] == lengths[:, 1]))

    def ragged(self, name: str, array: str, which: Any = slice(None)) -> Ragged:
        """View the sequences `name` of some rows in `array`, which has their layout."""
        column = self.names.index(name)
        starts, stops = self.starts[which, column], self.stops[which, column]
        return Ragged([self.arrays[array]], np.zeros(len(starts), np.int32), starts, stops)

    def choose(self, limit: Limit, unknown: int | None) -> None:
        """Decide which rows are used, and cut those that are too long. unknown: id of the unknown token."""
        self._drop(~self.trainable, "empty")
        self._drop(self.alike, "identical")
        if limit.tokens is None:
            return
        over = self.longest > limit.tokens
        if limit.overlong == "filter":
            self._drop(over, "filtered")
            return
        self._cut(limit, np.flatnonzero(over & self.used).tolist(), unknown)
        self._drop(over & ~self.trainable, "filtered")
        self._drop(over & self.alike, "alike_once_cut")
        self.cut = over & self.used

    def _drop(self, which: NDArray[np.bool_], reason: str) -> None:
        self.why[which & self.used] = REASONS.index(reason)

    def _cut(self, limit: Limit, rows: Sequence[int], unknown: int | None) -> None:
        """Cut all sequences to the limit, and compute the facts of these rows again."""
        over = np.maximum(self.lengths - (limit.tokens or 0), 0)
        if limit.truncation_mode == "keep_end":
            self.starts = self.starts + over
            self.firsts = None if self.firsts is None else np.maximum(self.firsts - over, 0)
        else:
            self.stops = self.stops - over
        for i in rows:
            sequences = [
                self.arrays[name][self.starts[i, k] : self.stops[i, k]] for k, name in enumerate(self.names)
            ]
            self.digests[i] = [digest64(ids) for ids in sequences]
            self.unknown[i] = unknown is not None and any((ids == unknown).any() for ids in sequences)
            if self.shared is not None:
                self.shared[i] = shared_start(sequences[0], sequences[1])

    def record(self, report: Report, notes: Sequence[str] | None) -> None:
        """Add the rows to the report's lists. notes: those for rows that are used; None: only drops and cuts."""
        report.total += len(self.why)
        for number, reason in enumerate(REASONS[1:], 1):
            self._add(self.why == number, getattr(report, reason))
        self._add(self.cut, report.truncated)
        if notes is None:
            return
        for name in notes:
            rows = self.arrays[f"{name}{ROWS}"]
            getattr(report, name).extend(self.table.where(i) for i in rows[self.used[rows]].tolist())
        self._add(self.unknown & self.used, report.unknown)
        fields = zip(self.arrays[FIELDS + ROWS].tolist(), self.arrays[FIELDS + NAMES].tolist(), strict=True)
        for i, name in fields:
            if self.used[i]:
                report.add_ignored_field(self.table.where(i), name.decode(errors="replace"))

    def _add(self, which: NDArray[np.bool_], places: list[str]) -> None:
        places += [self.table.where(i) for i in np.flatnonzero(which).tolist()]


def encode(
    records: Records, encoder: Encoder | None, kind: Kind, limit: Limit, *, part: bool = False
) -> Examples:
    """Encode all rows and choose those to use; the report says why others are not.

    part: the rows are some of a larger whole: they may all be dropped, and only drops and cuts are reported.
    Raises InputError naming file and row of the first few problems, and if no row is left.
    """
    limit.check()
    report = Report(kind.unit, limit.tokens, read_as=records.remarks)
    unknown = None if encoder is None else unknown_id(encoder.tokenizer)
    cache = TokenCache(kind.cached_as, encoder, list(kind.numbers))
    chosen: list[Selection] = []
    for table in records.tables:
        arrays = cache.encode(table, partial(_encode_table, kind=kind, unknown=unknown))
        rows = Selection(table, arrays, kind.sequences)
        if encoder is not None and "doubled" in kind.notes and not part:
            refuse_repeats(table, arrays[f"doubled{ROWS}"].tolist(), encoder.options.prompt_repeated)
        rows.choose(limit, unknown)
        rows.record(report, None if part else kind.notes)
        if not part and _skips_template(table, kind, encoder):
            rows._add(rows.used, report.untemplated)
        chosen.append(rows)
    _require_numbers(chosen, kind)
    examples = _gather(records, kind, chosen, report)
    report.kept = len(examples)
    if part:
        return examples
    _record_repeats(examples)
    lengths = np.concatenate([rows.longest[rows.why != REASONS.index("empty")] for rows in chosen])
    report.require_some(records.name, lengths, limit.setting)
    read = [kind.columns(table) for table in records.tables]
    report.columns = describe_columns(records.tables, read)
    others = [
        [name for name in table.columns if name not in (*names, *kind.numbers)]
        for table, names in zip(records.tables, read, strict=True)
    ]
    if kind.passes_others and any(others):
        report.columns += f"; for rewards: {describe_columns(records.tables, others)}"
    if not kind.passes_others:
        _list_unread_columns(report, records, others)
    return examples


def _encode_table(table: Table, kind: Kind, unknown: int | None) -> Arrays:
    """Encode the rows of a table, as `TokenCache.encode` calls it."""
    problems, notes = Problems(), Notes(kind.notes)
    # A number that every row needs is required of the rows that are used, which are not known yet.
    numbers = {
        VALUE.format(n): read_numbers(table, name, Problems() if missing is None else problems, missing)
        for n, (name, missing) in enumerate(kind.numbers.items())
    }
    sequences = kind.encode(table, notes, problems)
    return {**sequences, **numbers, **notes.arrays(), **sequence_facts(sequences, kind.sequences, unknown)}


def _require_numbers(chosen: Sequence[Selection], kind: Kind) -> None:
    """Raise InputError naming the first few rows that are used and have no number, or an invalid one."""
    problems = Problems()
    for n, name in enumerate(kind.numbers):
        for rows in chosen:
            invalid = rows.used & np.isnan(rows.arrays[VALUE.format(n)])
            for i in np.flatnonzero(invalid).tolist():
                try:
                    read_number(rows.table.rows[i], name)
                except InputError as error:
                    problems.add(f"{rows.table.where(i)}: {error}")
    problems.raise_if_any()


def _skips_template(table: Table, kind: Kind, encoder: Encoder | None) -> bool:
    """Whether the rows are plain texts, which could be conversations, and the tokenizer has a chat template."""
    names = [name for name in kind.columns(table) if name in CONVERSATIONS and name in table.columns]
    return bool(names) and skips_template(table, encoder, *names)


def _gather(records: Records, kind: Kind, chosen: Sequence[Selection], report: Report) -> Examples:
    """Gather the used rows of all tables."""

    def joined(array: Callable[[Selection], Any]) -> Any:
        return np.concatenate([array(rows)[rows.used] for rows in chosen])

    def sequences(name: str, array: str) -> Ragged:
        return Ragged.joined([rows.ragged(name, array, rows.used) for rows in chosen])

    offsets = zip(records.offsets(), chosen, strict=True)
    first = chosen[0]
    numbers = {
        name: np.concatenate([rows.arrays[VALUE.format(n)][rows.used] for rows in chosen])
        for n, name in enumerate(kind.numbers)
    }
    return Examples(
        records,
        np.concatenate([np.flatnonzero(rows.used) + offset for offset, rows in offsets]),
        {name: sequences(name, name) for name in kind.sequences},
        kind.branches,
        joined(lambda rows: rows.digests),
        report,
        numbers,
        None if first.firsts is None else joined(lambda rows: rows.firsts),
        sequences(kind.sequences[0], "learned") if "learned" in first.arrays else None,
        None if first.shared is None else joined(lambda rows: rows.shared),
    )


def _list_unread_columns(report: Report, records: Records, unread: Sequence[Sequence[str]]) -> None:
    """Add the columns to the report that are not read, with how many rows have them. unread: by table."""
    counts: dict[str, int] = {}
    for table, names in zip(records.tables, unread, strict=True):
        for name in names:
            if count := table.kind(name).total:
                counts[name] = counts.get(name, 0) + count
    if counts:
        listed = ", ".join(f"{name} (in {count:,})" for name, count in counts.items())
        report.not_read.append(f"unused columns: {listed}")


def sequence_facts(
    arrays: Mapping[str, NDArray[Any]], names: Sequence[str], unknown: int | None
) -> dict[str, NDArray[Any]]:
    """Compute facts of every row's sequences, so that later steps need not read the tokens again.

    Returns NAME_digest, uint64 [rows]; unknown, bool [rows], whether a sequence has the unknown token; and for two
    names shared, int32 [rows], the length of `shared_start`.
    """
    facts: dict[str, NDArray[Any]] = {}
    ends = {name: arrays[f"{name}{ENDS}"] for name in names}
    has_unknown = np.zeros(len(ends[names[0]]), bool)
    for name in names:
        flat, stops = arrays[name], ends[name].tolist()
        facts[f"{name}_digest"] = np.fromiter(
            (digest64(flat[start:stop]) for start, stop in itertools.pairwise([0, *stops])),
            np.uint64,
            len(stops),
        )
        if unknown is not None:
            has_unknown[np.searchsorted(ends[name], np.flatnonzero(flat == unknown), side="right")] = True
    facts["unknown"] = has_unknown
    if len(names) == 2:
        pairs = zip(*(itertools.pairwise([0, *ends[name].tolist()]) for name in names), strict=True)
        one, other = (arrays[name] for name in names)
        facts["shared"] = np.array([shared_start(one[a:b], other[c:d]) for (a, b), (c, d) in pairs], np.int32)
    return facts


def shared_start(one: Ints, other: Ints) -> int:
    """Return the length of the common token prefix, shorter than either sequence; 0 if one is empty."""
    return shared_prefix((one, other)) if len(one) and len(other) else 0


def _record_repeats(examples: Examples) -> None:
    """Report rows that repeat an earlier row's tokens, or reverse an earlier pair; not those repeated by `weight`."""
    report, digests = examples.report, examples.sequence_digests
    if not len(digests):
        return
    key = _mix(digests)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    same_row = examples.records.identities()[examples.rows]
    again = same_row[first[which]] != same_row
    report.duplicates += [examples.where(i) for i in np.flatnonzero(again).tolist()]
    if digests.shape[1] < 2:
        return
    back = _mix(digests[:, ::-1])
    at = np.minimum(np.searchsorted(key[first], back), len(first) - 1)
    earlier = (key[first][at] == back) & (first[at] < np.arange(len(key))) & (back != key) & ~again
    report.reversed += [examples.where(i) for i in np.flatnonzero(earlier).tolist()]


def _mix(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each row's digests to one number that depends on their order."""
    mixed = np.zeros(len(digests), np.uint64)
    for column in digests.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


@dataclass(eq=False)
class Examples(Trees):
    """Encoded rows: token ids in flat arrays, memory-mapped when cached; each row is made a tree on access.

    A pair is a tree [prompt | chosen | rejected], whose completions have weight 1 if their starts are known; a text one
    branch; a prompt has no branch.
    """

    records: Records
    rows: NDArray[np.int64]
    """[examples]: index of each one's row in the records."""
    sequences: Mapping[str, Ragged]
    """Whole sequences, prompt included: `chosen` and `rejected`, `tokens` of texts, or `ids` of prompts."""
    branches: int
    sequence_digests: NDArray[np.uint64]
    """[examples, sequences]: digests of the tokens."""
    report: Report
    values: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """{column of numbers: [examples]}, the same for all branches: of pairs `margin`, 0 where the data has none."""
    starts: NDArray[np.int64] | None = None
    """[examples, sequences]: index of each completion's first token; None where they were not asked for."""
    learned: Ragged | None = None
    """Of texts: bool, shaped like `tokens`, whether each token is learned."""
    shared: NDArray[np.int32] | None = None
    """Of pairs: length of the common token prefix, shorter than either sequence."""

    def __post_init__(self) -> None:
        lengths = self.sequence_lengths
        self.lengths = lengths.max(1)
        if self.shared is None:
            self.prefixes = np.zeros_like(self.lengths) if self.branches else self.lengths
        else:
            self.prefixes = self.shared.astype(np.int64)
            if self.starts is not None:  # nothing predicts a first token, so it may always be shared
                self.prefixes = np.minimum(self.prefixes, np.maximum(self.starts, 1).min(1))
        self.sizes = lengths.sum(1) - max(self.branches - 1, 0) * self.prefixes

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """int64 [examples, sequences]: tokens of each whole sequence."""
        return np.stack([ragged.lengths for ragged in self.sequences.values()], 1)

    @cached_property
    def trained(self) -> NDArray[np.int64]:  # type: ignore[override]
        """int64 [examples]: trained tokens; a first token never counts, since nothing predicts it."""
        if self.learned is not None:
            return self.learned.counts()
        if not self.branches:
            return np.zeros(len(self), np.int64)
        untrained = np.maximum(self.prefixes, 1)[:, None]
        if self.starts is not None:
            untrained = np.maximum(untrained, self.starts)
        return np.maximum(self.sequence_lengths - untrained, 0).sum(1)

    def tree(self, i: int) -> Tree:
        """Make the tree of an example, with `values` as its sequence values."""
        cut = int(self.prefixes[i])
        sequences = [ragged[i] for ragged in self.sequences.values()]
        if not self.branches:
            return Tree(sequences[0], ())
        weights = self.weights(i)
        return Tree(
            sequences[0][:cut],
            tuple(ids[cut:] for ids in sequences),
            None if weights is None else tuple(weight[cut:] for weight in weights),
            sequence_values={
                name: np.full(self.branches, column[i], np.float32) for name, column in self.values.items()
            },
        )

    def weights(self, i: int) -> list[NDArray[np.float32]] | None:
        """Return the weights of an example's whole sequences, 1 for tokens that are trained on; None: of all."""
        if self.learned is not None:
            return [self.learned[i].astype(np.float32)]
        if self.starts is None:
            return None
        sizes = [len(ragged[i]) for ragged in self.sequences.values()]
        return [
            (np.arange(size) >= start).astype(np.float32)
            for size, start in zip(sizes, self.starts[i], strict=True)
        ]

    def largest(self) -> int:
        return max(ragged.largest() for ragged in self.sequences.values())

    def where(self, i: int) -> str:
        """Name the row of example `i`, such as "prefs.jsonl row 17"."""
        return self.records.where(int(self.rows[i]))

    def row(self, i: int) -> Mapping[str, Any]:
        """Return the row of example `i`, as in the data."""
        row: Mapping[str, Any] = self.records[int(self.rows[i])]
        return row

    def column(self, name: str) -> Sequence[Any]:
        """View a column of the examples' rows, read on access; None where a row lacks it."""
        return self.records.column(name, self.rows) if name in self.records.columns else [None] * len(self)

    @property
    def digests(self) -> NDArray[np.uint64]:
        """uint64 [examples]: hashes of what is trained on: tokens, values, and which tokens are learned."""
        parts: list[NDArray[Any]] = [self.sequence_digests, *self.values.values()]
        if self.starts is not None:
            parts.append(self.starts)
        if self.learned is not None:
            parts.append(np.fromiter(map(digest64, self.learned), np.uint64, len(self)))
        return combine_digests(*parts)

    @property
    def ids(self) -> Ragged:
        """Of prompts: the tokens that a completion continues, int32 [n] each."""
        return self.sequences["ids"]

    @property
    def raw(self) -> Sequence[Turns]:
        """Of prompts: each as in the data, a text or a list of messages."""
        return self.column("prompt")

    @property
    def chat(self) -> bool:
        """Of prompts: whether they are conversations; reward functions then get completions as messages."""
        return is_chat(self.records.tables[0], "prompt")

    @cached_property
    def columns(self) -> dict[str, Sequence[Any]]:
        """Of prompts: the other columns, for reward functions."""
        return {name: self.column(name) for name in self.records.columns if name != "prompt"}


def require_vocabulary(trees: Sequence[Tree] | Ragged, where: Callable[[int], str], size: int) -> None:
    """Raise InputError naming the rows with token ids that a model with `size` embeddings lacks.

    trees: trees or sequences. where: names one by its index. Unchecked, such ids would read the last embedding.
    """
    if isinstance(trees, Trees | Ragged) and trees.largest() < size:
        return
    problems = Problems()
    for i, item in enumerate(trees):
        parts: Any = (item.prefix, *item.branches) if isinstance(item, Tree) else (item,)
        token = max(int(ids.max(initial=0)) for ids in parts)
        if token >= size:
            problems.add(
                f"{where(i)}: token id {token} is out of range (vocab_size {size}): use the tokenizer "
                "that the model was trained with"
            )
    problems.raise_if_any()
