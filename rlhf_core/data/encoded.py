"""Encoded preferences and demonstrations: token ids in flat arrays; objects are made on access."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import Ragged, combine_digests, fingerprint_of
from rlhf_core.data.report import Problems, Report
from rlhf_core.data.source import Places, View, cells
from rlhf_core.packing.rows import Tree, tree
from rlhf_core.packing.trees import Trees
from rlhf_core.tokenizer.encoding import Ints


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

    @property
    def fingerprint(self) -> str:
        """Hash of what is trained on: tokens, margins and completion starts, in order."""
        return fingerprint_of(self.row_digests())

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

    @property
    def fingerprint(self) -> str:
        """Hash of what is trained on: tokens, weights and values, in order."""
        content = hashlib.sha256(self.digests.astype("<u8").tobytes())
        for learned in self.learned:
            content.update(learned.tobytes())
        for column in self.values.values():
            content.update(column.astype("<f4").tobytes())
        return content.hexdigest()


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
