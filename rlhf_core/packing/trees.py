"""Trees of sequences that share a prefix, such as a preference pair or the completions of one prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]


class Tree(NamedTuple):
    """A shared prefix and the sequences that continue it."""

    prefix: Ints
    """int32 [p]: the tokens that all branches share, never trained on; may be empty."""
    branches: tuple[Ints, ...]
    """int32 [b] each: a branch's tokens after the prefix, at least one."""
    weights: tuple[Floats, ...] | None = None
    """float32 [b] each, per branch token; 0 is not trained on. None: all 1."""
    token_values: Mapping[str, tuple[Floats, ...]] = {}
    """float32 [b] each, per branch token, such as old log-probs in nats."""
    sequence_values: Mapping[str, Floats] = {}
    """float32 [branches], such as advantages or the pair's margin."""
    routes: tuple[NDArray[np.integer[Any]], ...] | None = None
    """int8 or int16 [b, layers · k] each: `Rollouts.routes` of the branch's tokens. None: not known."""

    @property
    def size(self) -> int:
        """Tokens in a row: the prefix once, and every branch."""
        return len(self.prefix) + sum(map(len, self.branches))


class Trees(Sequence[Tree]):
    """Trees that are made on access, with the sizes that layouts need as arrays, [trees]."""

    sizes: NDArray[np.int64]
    """`Tree.size` per tree."""
    trained: NDArray[np.int64]
    """Trained tokens per tree, the sum of `trained_per_branch`."""
    lengths: NDArray[np.int64]
    """Tokens of each tree's longest sequence, prefix included."""
    prefixes: NDArray[np.int64]
    """Tokens of each tree's prefix."""
    branches: int
    """Branches per tree, the same for all."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: Any) -> Any:
        """Return tree `i`, or a view of several: i is then a slice, or the trees' indices, int [n]."""
        if isinstance(i, slice | np.ndarray):
            return _Part(self, np.arange(len(self))[i])
        return self.tree(range(len(self))[i])

    def tree(self, i: int) -> Tree:
        """Make tree `i`."""
        raise NotImplementedError

    def largest(self) -> int:
        """Return an upper bound for all token ids."""
        raise NotImplementedError

    def changed(self, change: Callable[[int, Tree], Tree]) -> Trees:
        """View the trees with other values. change: called with a tree's index and the tree."""
        return _Changed(self, change)


class _Changed(Trees):
    def __init__(self, whole: Trees, change: Callable[[int, Tree], Tree]) -> None:
        self.whole, self.change = whole, change
        self.sizes, self.trained, self.lengths = whole.sizes, whole.trained, whole.lengths
        self.prefixes, self.branches = whole.prefixes, whole.branches

    def tree(self, i: int) -> Tree:
        return self.change(i, self.whole.tree(i))

    def largest(self) -> int:
        return self.whole.largest()


class _Part(Trees):
    def __init__(self, whole: Trees, which: NDArray[np.int64]) -> None:
        self.whole, self.which, self.branches = whole, which, whole.branches
        self.sizes, self.trained = whole.sizes[which], whole.trained[which]
        self.lengths, self.prefixes = whole.lengths[which], whole.prefixes[which]

    def tree(self, i: int) -> Tree:
        return self.whole.tree(int(self.which[i]))

    def largest(self) -> int:
        return self.whole.largest()


def sizes_of(trees: Sequence[Tree]) -> NDArray[np.int64]:
    """Return each tree's size in tokens, int64 [trees]."""
    return trees.sizes if isinstance(trees, Trees) else np.array([tree.size for tree in trees], np.int64)


def lengths_of(trees: Sequence[Tree]) -> NDArray[np.int64]:
    """Return the tokens of each tree's longest sequence, prefix included, int64 [trees]."""
    if isinstance(trees, Trees):
        return trees.lengths
    return np.array([len(tree.prefix) + max(map(len, tree.branches)) for tree in trees], np.int64)


def trained_of(trees: Sequence[Tree]) -> NDArray[np.int64]:
    """Return each tree's trained tokens, int64 [trees]."""
    if isinstance(trees, Trees):
        return trees.trained
    return np.array([sum(trained_per_branch(tree)) for tree in trees], np.int64)


def most_branches(trees: Sequence[Tree]) -> int:
    """Return the number of branches of the tree with the most."""
    return trees.branches if isinstance(trees, Trees) else max(len(tree.branches) for tree in trees)


def shared_prefix(sequences: Sequence[Ints], *, first_trained: Sequence[int] | None = None) -> int:
    """Return the length of the common token prefix, shortened so that every sequence has a token after it.

    sequences: int32 [n_i] each, at least one token. 0 for a single sequence.
    first_trained: index of each sequence's first trained token; trained tokens are never shared.
    """
    if len(sequences) < 2:
        return 0
    limit = min(map(len, sequences)) - 1
    if first_trained is not None:
        limit = min(limit, *first_trained)
    first = sequences[0][:limit]
    for other in sequences[1:]:
        differs = first != other[: len(first)]
        if differs.any():
            first = first[: int(differs.argmax())]
    return len(first)


def tree(
    sequences: Sequence[Ints],
    weights: Sequence[Floats] | None = None,
    *,
    token_values: Mapping[str, Sequence[Floats]] | None = None,
    sequence_values: Mapping[str, Floats] | None = None,
) -> Tree:
    """Make a tree of whole sequences that shares their longest common prefix.

    sequences: int32 [n_i] each. weights, token_values: float32 [n_i] each, aligned with the whole sequences.
    sequence_values: float32 [sequences].
    Raises ValueError for a sequence without tokens.
    """
    if not sequences or not all(map(len, sequences)):
        raise ValueError("a tree needs sequences of at least one token")
    # Nothing predicts a first token, so its weight trains nothing and the token may be shared.
    first_trained = None if weights is None else [_first_nonzero(weight) for weight in weights]
    cut = shared_prefix(sequences, first_trained=first_trained)
    return Tree(
        prefix=sequences[0][:cut],
        branches=tuple(sequence[cut:] for sequence in sequences),
        weights=None if weights is None else tuple(weight[cut:] for weight in weights),
        token_values={name: tuple(v[cut:] for v in values) for name, values in (token_values or {}).items()},
        sequence_values=dict(sequence_values or {}),
    )


def _first_nonzero(weight: Floats) -> int:
    trained = weight[1:] != 0
    return 1 + int(trained.argmax()) if trained.any() else len(weight)


def split(
    tree: Tree, limit: int, *, sequences: int | None = None, trained: int | None = None, group: int = 1
) -> list[Tree]:
    """Split a tree into trees of at most `limit` tokens, repeating the prefix and keeping the order of branches.

    sequences, trained: limits on each part's branches and trained tokens.
    group: branches that stay together (2 for preference pairs).
    Raises ValueError if a single group does not fit.
    """
    sizes = [len(branch) for branch in tree.branches]
    needs = trained_per_branch(tree)
    max_sequences = sequences or math.inf
    max_trained = trained or math.inf
    parts: list[Tree] = []
    start = 0
    while start < len(sizes):
        stop = start
        size = len(tree.prefix)
        need = 0
        while stop < len(sizes):
            end = min(stop + group, len(sizes))
            size += sum(sizes[stop:end])
            need += sum(needs[stop:end])
            if size > limit or end - start > max_sequences or need > max_trained:
                break
            stop = end
        if stop == start:
            raise ValueError(
                f"a prompt of {len(tree.prefix)} tokens with branches of "
                f"{sizes[start : start + group]} tokens does not fit a row of {limit} tokens, "
                f"{sequences or 'any'} sequences, {trained or 'any'} trained tokens"
            )
        parts.append(_with_branches(tree, slice(start, stop)))
        start = stop
    return parts


def _with_branches(tree: Tree, part: slice) -> Tree:
    """Make a tree of some of a tree's branches."""
    return Tree(
        prefix=tree.prefix,
        branches=tree.branches[part],
        weights=None if tree.weights is None else tree.weights[part],
        token_values={name: values[part] for name, values in tree.token_values.items()},
        sequence_values={name: values[part] for name, values in tree.sequence_values.items()},
        routes=None if tree.routes is None else tree.routes[part],
    )


def trained_per_branch(tree: Tree) -> list[int]:
    """Count each branch's trained tokens: those with nonzero weight and a token before them that predicts them."""
    skip = 0 if len(tree.prefix) else 1
    if tree.weights is None:
        return [len(branch) - skip for branch in tree.branches]
    return [int(np.count_nonzero(weight[skip:])) for weight in tree.weights]
