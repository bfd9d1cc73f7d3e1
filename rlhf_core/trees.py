"""Trees: sequences that share their start, such as a preference pair or the completions of one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]


class Tree(NamedTuple):
    """A shared prefix and the sequences that continue it."""

    prefix: Ints
    """int32 [p]: the tokens that all branches share, never trained; may be empty."""
    branches: tuple[Ints, ...]
    """int32, each branch's own tokens, at least one."""
    weights: tuple[Floats, ...] | None = None
    """float32, one a branch's own token, 0: not trained; None: 1 for all of them."""
    token_values: Mapping[str, tuple[Floats, ...]] = {}
    """float32 per own token, such as old log-probs in nats."""
    sequence_values: Mapping[str, Floats] = {}
    """float32 [branches], such as advantages or the pair's margin."""

    @property
    def size(self) -> int:
        """Tokens it takes in a row: the prefix once, and every branch."""
        return len(self.prefix) + sum(map(len, self.branches))


def shared_prefix(sequences: Sequence[Ints], *, first_trained: Sequence[int] | None = None) -> int:
    """Length of the longest common token prefix, cut so that every sequence keeps a token of its own.

    sequences: int32 [n_i] each, at least one token. A single sequence shares nothing: 0.
    first_trained: index of each sequence's first trained token; no trained token is shared.
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
    """The tree of whole sequences, their longest common prefix shared.

    sequences: int32 [n_i] each. weights, token_values: float32 [n_i] each, aligned with the whole sequences.
    sequence_values: float32 [sequences].
    Raises ValueError for a sequence without tokens.
    """
    if not sequences or not all(map(len, sequences)):
        raise ValueError("a tree needs sequences of at least one token")
    # A first token has no prediction, so a weight on it trains nothing and may be shared.
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
    """Trees of at most `limit` tokens with the same branches in the same order, the prefix repeated in each.

    sequences, trained: limits on the branches and on the trained tokens of each part.
    group: branches that stay together (2 for preference pairs).
    Raises ValueError where even one group does not fit.
    """
    sizes = [len(branch) for branch in tree.branches]
    needs = trained_per_branch(tree)
    parts: list[Tree] = []
    start = 0
    while start < len(sizes):
        stop = start
        size, need = len(tree.prefix), 0
        while stop < len(sizes):
            end = min(stop + group, len(sizes))
            size, need = size + sum(sizes[stop:end]), need + sum(needs[stop:end])
            if size > limit or end - start > (sequences or end) or need > (trained or need):
                break
            stop = end
        if stop == start:
            raise ValueError(
                f"a prompt of {len(tree.prefix)} tokens with branches of "
                f"{sizes[start : start + group]} tokens does not fit a row of {limit} tokens, "
                f"{sequences or 'any'} sequences, {trained or 'any'} trained tokens"
            )
        part = slice(start, stop)
        parts.append(
            Tree(
                prefix=tree.prefix,
                branches=tree.branches[part],
                weights=None if tree.weights is None else tree.weights[part],
                token_values={name: values[part] for name, values in tree.token_values.items()},
                sequence_values={name: values[part] for name, values in tree.sequence_values.items()},
            )
        )
        start = stop
    return parts


def trained_per_branch(tree: Tree) -> list[int]:
    """Tokens of each branch that are trained on: weight not 0, and a token before them that predicts them."""
    skip = 0 if len(tree.prefix) else 1
    if tree.weights is None:
        return [len(branch) - skip for branch in tree.branches]
    return [int(np.count_nonzero(weight[skip:])) for weight in tree.weights]
