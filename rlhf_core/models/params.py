"""Parameters that are trained and parameters that are not: two nested dicts that together are the model's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_core.errors import InputError, suggest

Path: TypeAlias = tuple[str, ...]
"""The keys from the outermost dict to a leaf, such as ("layers", "mlp", "up_proj", "kernel")."""


def paths(params: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of every leaf."""
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), leaf) for path, leaf in paths(value))
        else:
            yield (name,), value


def matching(params: Mapping[str, Any], patterns: str | Sequence[str]) -> frozenset[Path]:
    """The paths in which, written with dots, one of the regular expressions is found.

    Raises InputError for one that is found in no path, and where all of them leave nothing to train.
    """
    hits = named(params, patterns)
    if len(hits) == sum(1 for _ in paths(params)):
        raise InputError("frozen_parameters: all parameters match; nothing would be trained")
    return hits


def named(params: Mapping[str, Any], patterns: str | Sequence[str]) -> frozenset[Path]:
    """Find the paths as `matching` does; all of them may match."""
    every = [path for path, _ in paths(params)]
    dotted = [".".join(path) for path in every]
    found: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {path for path, name in zip(every, dotted, strict=True) if re.search(pattern, name)}
        if not hits:
            words = {word for path in every for word in path}
            raise InputError(
                f"frozen_parameters: {pattern!r} is found in no parameter.{suggest(pattern, words)} "
                f"The model has {', '.join(dotted[:3])}, …, {dotted[-1]}"
            )
        found |= hits
    return frozenset(found)


def split(params: Mapping[str, Any], fixed: frozenset[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the leaves whose path is not in `fixed`, those whose path is), nested dicts without empty ones."""
    trained: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for path, leaf in paths(params):
        into = rest if path in fixed else trained
        for name in path[:-1]:
            into = into.setdefault(name, {})
        into[path[-1]] = leaf
    return trained, rest


def join(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `split`."""
    joined = dict(first)
    for name, value in second.items():
        joined[name] = join(first[name], value) if name in first else value
    return joined
