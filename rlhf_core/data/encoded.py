"""Encoded data: the rows to use of each table, and pairs and texts in flat arrays, made objects on access."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from rlhf_core.data.columns import skips_template
from rlhf_core.data.report import Problems, Report, shorten
from rlhf_core.data.table import Places, Records, Table, View, cells
from rlhf_core.errors import InputError
from rlhf_core.packing.rows import Tree, shared_prefix, tree
from rlhf_core.packing.trees import Trees
from rlhf_core.tokenizer.encoding import Encoder, Ints, Message, Turns

FIELDS = "ignored_fields"


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


class RowForm(NamedTuple):
    """How rows of one kind of data become sequences."""

    unit: str
    """Plural noun for rows, such as "pairs"."""
    names: tuple[str, ...]
    """The sequences of a row."""
    notes: tuple[str, ...]
    """Lists of `Report` for unusual rows that are kept."""
    encode: Callable[[Table], Arrays]
    """Tokenises the rows of a table, as `TokenCache.encode` calls it."""
    trainable: Callable[[Selection], NDArray[np.bool_]]
    """Marks rows with something to train on, bool [rows]."""
    text_columns: Callable[[Table], Sequence[str]]
    """Columns that a chat template would apply to if they held conversations."""


class Selection:
    """The rows of one table to use; at first all of them."""

    def __init__(self, table: Table, offset: int, arrays: Arrays, names: Sequence[str]) -> None:
        """offset: index of the table's first row in the records. names: the sequences in `arrays`, which also has
        their `sequence_facts`.
        """
        self.table, self.offset, self.arrays, self.names = table, offset, arrays, names
        self.stops = {name: np.array(arrays[f"{name}{ENDS}"], np.int64) for name in names}
        self.starts = {name: np.concatenate([[0], stops[:-1]]) for name, stops in self.stops.items()}
        self.count = len(self.stops[names[0]])
        self.used = np.ones(self.count, bool)
        self.lost = np.zeros((self.count, len(names)), np.int64)
        """[rows, names]: tokens cut off at the start of each sequence."""
        self.digests = np.stack([arrays[f"{name}_digest"] for name in names], 1)
        self.unknown = np.array(arrays["unknown"])
        self.shared: NDArray[Any] = np.array(arrays.get("shared", ()))

    def lengths(self, name: str) -> NDArray[np.int64]:
        return self.stops[name] - self.starts[name]

    @property
    def longest(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens of each row's longest sequence."""
        return np.max([self.lengths(name) for name in self.names], axis=0)

    @property
    def identical(self) -> NDArray[np.bool_]:
        """bool [rows]: whether a row's two sequences are the same tokens; false for rows of one sequence."""
        if len(self.names) < 2:
            return np.zeros(self.count, np.bool_)
        one, other = (self.lengths(name) for name in self.names)
        return np.asarray((self.digests[:, 0] == self.digests[:, 1]) & (one == other))

    def drop(self, which: NDArray[np.bool_], places: list[str]) -> None:
        """Stop using these rows and add their names to a list of the report."""
        which = which & self.used
        self.used &= ~which
        self.record(which, places)

    def record(self, which: NDArray[np.bool_], places: list[str]) -> None:
        """Add the names of these rows to a list of the report."""
        places += [self.table.where(i) for i in np.flatnonzero(which).tolist()]

    def cut(self, limit: int, mode: str, unknown: int | None) -> None:
        """Cut the sequences to `limit` tokens by `Limit.truncation_mode`, and recompute their facts."""
        which = self.used & (self.longest > limit)
        for column, name in enumerate(self.names):
            over = np.maximum(self.lengths(name) - limit, 0)
            if mode == "keep_end":
                self.starts[name] = self.starts[name] + over
                self.lost[:, column] = over
            else:
                self.stops[name] = self.stops[name] - over
        for i in np.flatnonzero(which).tolist():
            sequences = [self.arrays[name][self.starts[name][i] : self.stops[name][i]] for name in self.names]
            self.digests[i] = [digest64(ids) for ids in sequences]
            self.unknown[i] = unknown is not None and any((ids == unknown).any() for ids in sequences)
            if len(self.shared):
                self.shared[i] = shared_start(sequences[0], sequences[1])

    def record_notes(self, names: Sequence[str], report: Report) -> None:
        """Add used rows with notes, and those with unknown tokens, to the report's lists."""
        for name in names:
            rows = self.arrays[f"{name}{ROWS}"]
            getattr(report, name).extend(self.table.where(i) for i in rows[self.used[rows]].tolist())
        self.record(self.unknown & self.used, report.unknown)
        fields = zip(self.arrays[FIELDS + ROWS].tolist(), self.arrays[FIELDS + NAMES].tolist(), strict=True)
        for i, name in fields:
            if self.used[i]:
                report.add_ignored_field(self.table.where(i), name.decode(errors="replace"))


class Selected(NamedTuple):
    """The used rows of all tables."""

    parts: list[Selection]
    report: Report
    places: Places
    digests: NDArray[np.uint64]
    """[rows, names]: digests of the rows' sequences."""

    def sequences(self, name: str, array: str | None = None) -> Ragged:
        """Gather the sequences `name`, from another array of the same layout if `array` is given."""
        return Ragged.joined(
            [
                (rows.arrays[array or name], rows.starts[name][rows.used], rows.stops[name][rows.used])
                for rows in self.parts
            ]
        )

    def values(self, of: Callable[[Selection], NDArray[Any]]) -> NDArray[Any]:
        """Concatenate values of the used rows. of: returns those of all rows of a table."""
        return np.concatenate([of(rows)[rows.used] for rows in self.parts])


def select(
    records: Records, cache: TokenCache, form: RowForm, limit: Limit, *, part: bool = False
) -> Selected:
    """Encode all rows and select those to use; the report says why others are not.

    part: the rows are some of a larger whole: they may all be dropped, and only drops and cuts are reported.
    Raises InputError naming file and row of the first few problems, and if no row is left.
    """
    limit.check()
    report = Report(form.unit, limit.tokens, read_as=records.remarks)
    encoder = cache.encoder
    unknown = None if encoder is None else unknown_id(encoder.tokenizer)

    def encode(table: Table) -> Arrays:
        arrays = form.encode(table)
        return arrays | sequence_facts(arrays, form.names, unknown)

    parts: list[Selection] = []
    lengths: list[NDArray[np.int64]] = []
    for table, offset in zip(records.tables, records.offsets(), strict=True):
        rows = Selection(table, offset, cache.encode(table, encode), form.names)
        report.total += rows.count
        if encoder is not None and "doubled" in form.notes and not part:
            refuse_repeats(table, rows.arrays[f"doubled{ROWS}"].tolist(), encoder.options.prompt_repeated)
        rows.drop(~form.trainable(rows), report.empty)
        lengths.append(rows.longest[rows.used])
        rows.drop(rows.identical, report.identical)
        over = np.zeros(rows.count, np.bool_) if limit.tokens is None else rows.longest > limit.tokens
        if limit.tokens is not None and limit.overlong == "truncate":
            rows.cut(limit.tokens, limit.truncation_mode, unknown)
            rows.drop(over & ~form.trainable(rows), report.filtered)
            rows.drop(over & rows.identical, report.alike_once_cut)
            rows.record(over & rows.used, report.truncated)
        else:
            rows.drop(over, report.filtered)
        parts.append(rows)
        if part:
            continue
        rows.record_notes(form.notes, report)
        columns = form.text_columns(table)
        if columns and skips_template(table, encoder, *columns):
            rows.record(rows.used, report.untemplated)
    kept = np.concatenate([np.flatnonzero(rows.used) + rows.offset for rows in parts])
    places = Places(records, kept)
    digests = np.concatenate([rows.digests[rows.used] for rows in parts])
    report.kept = len(kept)
    if part:
        return Selected(parts, report, places, digests)
    record_repeats(report, digests, places)
    report.require_some(records.name, np.concatenate(lengths), limit.setting)
    return Selected(parts, report, places, digests)


def refuse_repeats(table: Table, doubled: Sequence[int], repeated: bool | None) -> None:
    """Raise InputError if most rows' completions repeat the prompt and `prompt_repeated` is not set.

    doubled: the rows that repeat it. repeated: `TextOptions.prompt_repeated`.
    """
    if repeated is None and len(doubled) * 2 > len(table.rows):
        rows = shorten([table.where(i) for i in doubled])
        raise InputError(
            f"{table.name}: in {len(doubled):,} of {len(table.rows):,} rows a completion begins with the text of its "
            f"prompt ({rows}): set prompt_repeated = true to take it off, or prompt_repeated = false if the model "
            "should read it twice"
        )


def list_unread_columns(report: Report, records: Records, read: Callable[[Table], Iterable[str]]) -> None:
    """Add the columns to the report that `read` does not return for a table, with how many rows have them."""
    counts: dict[str, int] = {}
    for table in records.tables:
        used = set(read(table))
        for name in table.columns:
            if name not in used and (count := table.kind(name).total):
                counts[name] = counts.get(name, 0) + count
    if counts:
        listed = ", ".join(f"{name} (in {count:,})" for name, count in counts.items())
        report.not_read.append(f"unused columns: {listed}")


class Notes:
    """Unusual rows of a table, by the name of the `Report` list they belong to."""

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

    def record(self, table: Table, report: Report) -> None:
        """Add the rows of a table to the report's lists."""
        for name, rows in self.rows.items():
            getattr(report, name).extend(table.where(i) for i in sorted(rows))
        for i, name in self.fields:
            report.add_ignored_field(table.where(i), name)

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


def sequence_facts(
    arrays: Mapping[str, NDArray[Any]], names: Sequence[str], unknown: int | None
) -> dict[str, NDArray[Any]]:
    """Compute facts of every row's sequences, so that later steps need not read the tokens again.

    Returns NAME_digest, uint64 [rows]; unknown, bool [rows], whether a sequence has the unknown token; and for two
    names shared, int32 [rows], the length of `shared_start`.
    """
    facts: dict[str, NDArray[Any]] = {}
    ends = {name: arrays[f"{name}_ends"] for name in names}
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


def record_repeats(report: Report, digests: NDArray[np.uint64], rows: Places) -> None:
    """Report rows that repeat an earlier row's tokens, or reverse an earlier pair.

    digests: [rows, sides], of the sequences of kept rows. A row repeated by `weight` does not count.
    """
    if not len(digests):
        return
    key = _mix(digests)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    same_row = rows.identities()
    again = same_row[first[which]] != same_row
    report.duplicates += [rows[i] for i in np.flatnonzero(again).tolist()]
    if digests.shape[1] < 2:
        return
    back = _mix(digests[:, ::-1])
    at = np.minimum(np.searchsorted(key[first], back), len(first) - 1)
    earlier = (key[first][at] == back) & (first[at] < np.arange(len(key))) & (back != key) & ~again
    report.reversed += [rows[i] for i in np.flatnonzero(earlier).tolist()]


def _mix(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each row's digests to one number that depends on their order."""
    mixed = np.zeros(len(digests), np.uint64)
    for column in digests.T:
        mixed = (mixed ^ column) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed


class Pair(NamedTuple):
    """One preference, prompt included."""

    chosen: Ints
    """int32 [n]."""
    rejected: Ints
    """int32 [m]."""
    margin: float
    """Reward units; 0 where the data has none."""
    starts: tuple[int, int] | None = None
    """Index of the first completion token of chosen and of rejected; None unless `completions` was set."""


@dataclass(frozen=True)
class Pairs:
    """Encoded preferences: token ids in flat arrays, memory-mapped when cached; objects are made on access."""

    chosen: Ragged
    rejected: Ragged
    margins: NDArray[np.float64]
    """Reward units; 0 where the data has none."""
    starts: NDArray[np.int64] | None
    """[pairs, 2]: `Pair.starts`."""
    shared: NDArray[np.int32]
    """Length of the common token prefix, shorter than either side."""
    digests: NDArray[np.uint64]
    """[pairs, 2]: digests of the tokens of chosen and rejected."""
    report: Report
    places: Places
    """Where each pair comes from, such as "prefs.jsonl row 17"."""

    def __len__(self) -> int:
        return len(self.chosen)

    def where(self, i: int) -> str:
        return self.places[i]

    @property
    def pairs(self) -> Sequence[Pair]:
        return View(len(self), lambda which: [self._pair(i) for i in which])

    def _pair(self, i: int) -> Pair:
        starts = None if self.starts is None else (int(self.starts[i, 0]), int(self.starts[i, 1]))
        return Pair(self.chosen[i], self.rejected[i], float(self.margins[i]), starts)

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [pairs]: index of each pair's row in the records."""
        return self.places.rows

    def column(self, name: str) -> Sequence[Any]:
        """View a column of the pairs' rows, read on access; None where a row lacks it."""
        records = self.places.records
        return cells(records, self.rows, name) if name in records.columns else [None] * len(self)

    def trees(self) -> Trees:
        """View each pair as a tree [prompt | chosen | rejected] with the sequence value `margin` on both branches.

        With `starts`, completion tokens have weight 1 and prompt tokens 0.
        """
        return _PairTrees(self)

    def row_digests(self) -> NDArray[np.uint64]:
        """Hash what is trained on in each row, uint64 [pairs]: tokens, margin and completion starts."""
        return combine_digests(self.digests, self.margins, *([] if self.starts is None else [self.starts]))


class _PairTrees(Trees):
    branches = 2

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        chosen, rejected = pairs.chosen.lengths, pairs.rejected.lengths
        prefix = pairs.shared.astype(np.int64)
        firsts = np.zeros((len(pairs), 2), np.int64) if pairs.starts is None else pairs.starts
        if pairs.starts is not None:  # nothing predicts a first token, so it may always be shared
            prefix = np.minimum(prefix, np.maximum(firsts, 1).min(1))
        self.prefixes = prefix
        self.sizes = chosen + rejected - prefix
        self.lengths = np.maximum(chosen, rejected)
        untrained = np.maximum(np.maximum(firsts, prefix[:, None]), 1)
        self.trained = np.maximum(np.stack([chosen, rejected], 1) - untrained, 0).sum(1)

    def tree(self, i: int) -> Tree:
        pair = self.pairs._pair(i)
        margin = np.full(2, pair.margin, np.float32)
        return tree(pair[:2], _weights(pair), sequence_values={"margin": margin})

    def largest(self) -> int:
        return max(self.pairs.chosen.largest(), self.pairs.rejected.largest())


def _weights(pair: Pair) -> list[NDArray[np.float32]] | None:
    if pair.starts is None:
        return None
    return [
        (np.arange(len(ids)) >= start).astype(np.float32)
        for ids, start in zip(pair[:2], pair.starts, strict=True)
    ]


class Text(NamedTuple):
    """One demonstration."""

    tokens: Ints
    """int32 [n], EOS last."""
    weights: NDArray[np.float32]
    """float32 [n]: 1 for learned tokens, 0 for prompt tokens."""


@dataclass(frozen=True)
class Texts:
    """Encoded demonstrations; like `Pairs`, they are flat arrays whose objects are made on access."""

    tokens: Ragged
    learned: Ragged
    """bool, shaped like `tokens`: whether each token is learned."""
    trained: NDArray[np.int64]
    """int64 [texts]: learned tokens per text; the first token never counts, since nothing predicts it."""
    digests: NDArray[np.uint64]
    """[texts, 1]: digest of each text's tokens."""
    report: Report
    places: Places
    values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """{column: float32 [texts]}: the requested columns of numbers."""

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, i: int) -> str:
        """Name the row of text `i`, such as "corpus.jsonl row 17"."""
        return self.places[i]

    @property
    def texts(self) -> Sequence[Text]:
        return View(len(self), lambda which: [self._text(i) for i in which])

    def _text(self, i: int) -> Text:
        return Text(self.tokens[i], self.learned[i].astype(np.float32))

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [texts]: index of each text's row in the records."""
        return self.places.rows

    def trees(self) -> Trees:
        """View each text as a tree with one branch and `values` as its sequence values."""
        return _TextTrees(self)


class _TextTrees(Trees):
    branches = 1

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.sizes = self.lengths = texts.tokens.lengths
        self.prefixes = np.zeros_like(self.sizes)
        self.trained = texts.trained

    def tree(self, i: int) -> Tree:
        tokens, weights = self.texts._text(i)
        values = {name: column[[i]] for name, column in self.texts.values.items()}
        return Tree(tokens[:0], (tokens,), (weights,), sequence_values=values)

    def largest(self) -> int:
        return self.texts.tokens.largest()


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
