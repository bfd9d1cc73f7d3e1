"""Encoded data: rows of any kind as token ids in flat arrays, each made a tree on access, and which rows are used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import (
    ENDS,
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
class RowKind:
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
"""Name of the array with column n of `RowKind.numbers`."""
REASONS = ("", "empty", "identical", "filtered", "alike_once_cut")
"""Why a row is dropped, as the list of `Report` is called; the first is of rows that are used."""


def encode(
    records: Records, encoder: Encoder | None, kind: RowKind, limit: Limit, *, part: bool = False
) -> Examples:
    """Encode all rows and choose those to use; the report says why others are not.

    part: the rows are some of a larger whole: they may all be dropped, and only drops and cuts are reported.
    Raises InputError naming file and row of the first few problems, and if no row is left.
    """
    limit.check()
    unknown = None if encoder is None else unknown_id(encoder.tokenizer)
    cache = TokenCache(kind.cached_as, encoder, list(kind.numbers))
    encoded: list[Arrays] = []
    for table in records.tables:
        arrays = cache.encode(table, partial(_encode_table, kind=kind, unknown=unknown))
        if encoder is not None and "doubled" in kind.notes and not part:
            doubled = np.flatnonzero(arrays["doubled"]).tolist()
            refuse_repeats(table, doubled, encoder.options.prompt_repeated)
        encoded.append(arrays)
    report = Report(kind.unit, limit.tokens, read_as=records.remarks)
    every = _join(records, kind, encoded, report)
    chosen, why = _choose(every, limit)
    used = why == 0
    examples = _only(chosen, used)
    report.total, report.kept = len(every), len(examples)

    def record(which: NDArray[np.bool_], reason: str) -> None:
        getattr(report, reason).extend(every.where(i) for i in np.flatnonzero(which).tolist())

    for number, reason in enumerate(REASONS[1:], 1):
        record(why == number, reason)
    cut = (chosen.sequence_lengths < every.sequence_lengths).any(1) & used
    record(cut, "truncated")
    _require_numbers(examples, kind)
    if part:
        return examples
    has_unknown = _joined(encoded, "unknown")
    for i in np.flatnonzero(cut & has_unknown).tolist():  # it may have been cut away
        has_unknown[i] = any((ragged[i] == unknown).any() for ragged in chosen.sequences.values())
    record(has_unknown & used, "unknown")
    for name in kind.notes:
        record(_joined(encoded, name) & used, name)
    fields = _ragged(encoded, FIELDS, FIELDS)
    for i in np.flatnonzero(used & (fields.lengths > 0)).tolist():
        report.add_ignored_fields(every.where(i), fields[i].tobytes().decode().split("\n"))
    untemplated = [
        np.full(len(table.rows), _skips_template(table, kind, encoder)) for table in records.tables
    ]
    record(np.concatenate(untemplated) & used, "untemplated")
    _record_repeats(examples)
    report.require_some(records.name, every.lengths[why != REASONS.index("empty")], limit.setting)
    _record_columns(report, kind, records)
    return examples


def _encode_table(table: Table, kind: RowKind, unknown: int | None) -> Arrays:
    """Encode the rows of a table, as `TokenCache.encode` calls it."""
    problems = Problems()
    notes = Notes(kind.notes, len(table.rows))
    # A number that every row needs is required of the rows that are used, which are not known yet.
    numbers = {
        VALUE.format(n): read_numbers(table, name, Problems() if missing is None else problems, missing)
        for n, (name, missing) in enumerate(kind.numbers.items())
    }
    sequences = kind.encode(table, notes, problems)
    return {**sequences, **numbers, **notes.arrays(), **sequence_facts(sequences, kind.sequences, unknown)}


def _join(records: Records, kind: RowKind, encoded: Sequence[Arrays], report: Report) -> Examples:
    """Make examples of all rows of the records, used or not. encoded: the arrays of each table."""

    def joined(name: str) -> Any:
        return _joined(encoded, name) if name in encoded[0] else None

    return Examples(
        records,
        np.arange(len(records)),
        {name: _ragged(encoded, name, name) for name in kind.sequences},
        kind.branches,
        np.stack([joined(f"{name}_digest") for name in kind.sequences], 1),
        report,
        {name: joined(VALUE.format(n)) for n, name in enumerate(kind.numbers)},
        joined("starts"),
        _ragged(encoded, kind.sequences[0], "learned") if "learned" in encoded[0] else None,
        joined("shared"),
    )


def _joined(encoded: Sequence[Arrays], name: str) -> NDArray[Any]:
    """Return the array `name` of all tables."""
    return np.concatenate([arrays[name] for arrays in encoded])


def _ragged(encoded: Sequence[Arrays], name: str, array: str) -> Ragged:
    """View the sequences `name` of all tables in their arrays `array`, which have the layout of `name`."""
    ends = [np.concatenate([np.zeros(1, np.int64), arrays[f"{name}{ENDS}"]]) for arrays in encoded]
    which = np.repeat(np.arange(len(ends), dtype=np.int32), [len(stops) - 1 for stops in ends])
    starts, stops = (np.concatenate([each[part] for each in ends]) for part in (np.s_[:-1], np.s_[1:]))
    return Ragged([arrays[array] for arrays in encoded], which, starts, stops)


def _choose(every: Examples, limit: Limit) -> tuple[Examples, NDArray[np.int8]]:
    """Cut the rows that are too long; return [rows], the index in `REASONS` of why each is dropped, too."""
    why = np.zeros(len(every), np.int8)

    def drop(which: NDArray[np.bool_], reason: str) -> None:
        why[which & (why == 0)] = REASONS.index(reason)

    drop(~_trainable(every), "empty")
    drop(_alike(every), "identical")
    if limit.tokens is None:
        return every, why
    over = every.lengths > limit.tokens
    if limit.overlong == "filter":
        drop(over, "filtered")
        return every, why
    chosen = _cut(every, limit, np.flatnonzero(over & (why == 0)).tolist())
    drop(over & ~_trainable(chosen), "filtered")
    drop(over & _alike(chosen), "alike_once_cut")
    return chosen, why


def _trainable(examples: Examples) -> NDArray[np.bool_]:
    """Tell whether there is something to train on in every sequence, bool [examples]."""
    if examples.learned is not None:
        return examples.learned.counts() > 0
    least = 0 if examples.starts is None else np.maximum(examples.starts, 1)
    return np.asarray((examples.sequence_lengths > least).all(1))


def _alike(examples: Examples) -> NDArray[np.bool_]:
    """Tell whether both sequences are the same tokens, bool [examples]; false for texts and prompts."""
    digests, lengths = examples.sequence_digests, examples.sequence_lengths
    if digests.shape[1] < 2:
        return np.zeros(len(examples), bool)
    return np.asarray((digests[:, 0] == digests[:, 1]) & (lengths[:, 0] == lengths[:, 1]))


def _only(examples: Examples, which: NDArray[np.bool_]) -> Examples:
    """Take some of the examples. which: bool [examples]."""
    return replace(
        examples,
        rows=examples.rows[which],
        sequences={name: ragged[which] for name, ragged in examples.sequences.items()},
        sequence_digests=examples.sequence_digests[which],
        values={name: column[which] for name, column in examples.values.items()},
        starts=None if examples.starts is None else examples.starts[which],
        learned=None if examples.learned is None else examples.learned[which],
        shared=None if examples.shared is None else examples.shared[which],
    )


def _cut(every: Examples, limit: Limit, rows: Sequence[int]) -> Examples:
    """Cut all sequences to the limit, and compute the facts of these rows again."""
    over = np.maximum(every.sequence_lengths - (limit.tokens or 0), 0)
    at_start = limit.truncation_mode == "keep_end"

    def cut(ragged: Ragged, column: int) -> Ragged:
        ends = (over[:, column], 0) if at_start else (0, over[:, column])
        return Ragged(ragged.flats, ragged.which, ragged.starts + ends[0], ragged.stops - ends[1])

    sequences = {name: cut(ragged, k) for k, (name, ragged) in enumerate(every.sequences.items())}
    digests = every.sequence_digests.copy()
    shared = None if every.shared is None else every.shared.copy()
    for i in rows:
        ids = [ragged[i] for ragged in sequences.values()]
        digests[i] = [digest64(each) for each in ids]
        if shared is not None:
            shared[i] = shared_start(ids[0], ids[1])
    starts = every.starts
    if starts is not None and at_start:
        starts = np.maximum(starts - over, 0)
    learned = None if every.learned is None else cut(every.learned, 0)
    return replace(
        every,
        sequences=sequences,
        sequence_digests=digests,
        starts=starts,
        learned=learned,
        shared=shared,
    )


def _require_numbers(examples: Examples, kind: RowKind) -> None:
    """Raise InputError naming the first few examples that have no number, or an invalid one."""
    problems = Problems()
    for name in kind.numbers:
        for i in np.flatnonzero(np.isnan(examples.values[name])).tolist():
            try:
                read_number(examples.row(i), name)
            except InputError as error:
                problems.add(f"{examples.where(i)}: {error}")
    problems.raise_if_any()


def _skips_template(table: Table, kind: RowKind, encoder: Encoder | None) -> bool:
    """Whether the rows are plain texts, which could be conversations, and the tokenizer has a chat template."""
    names = [name for name in kind.columns(table) if name in CONVERSATIONS and name in table.columns]
    return bool(names) and skips_template(table, encoder, *names)


def _record_columns(report: Report, kind: RowKind, records: Records) -> None:
    """Say which columns are read, and which are not."""
    read = [kind.columns(table) for table in records.tables]
    report.columns = describe_columns(records.tables, read)
    others = [
        [name for name in table.columns if name not in (*names, *kind.numbers)]
        for table, names in zip(records.tables, read, strict=True)
    ]
    if kind.passes_others:
        rewards = describe_columns(records.tables, others)
        report.columns += f"; for rewards: {rewards}" if rewards else ""
        return
    counts: dict[str, int] = {}
    for table, names in zip(records.tables, others, strict=True):
        for name in names:
            count = table.kind(name).total
            if count:
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
        flat = arrays[name]
        stops = ends[name].tolist()
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
