"""Split parameters into trained and fixed ones, two nested dicts, and join them again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_core.errors import InputError, suggest

Path: TypeAlias = tuple[str, ...]
"""The keys from the outermost dict to a leaf, such as ("layers", "mlp", "up_proj", "kernel")."""


def paths(params: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) for every leaf."""
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from (((name, *path), leaf) for path, leaf in paths(value))
        else:
            yield (name,), value


def matching(params: Mapping[str, Any], patterns: str | Sequence[str]) -> frozenset[Path]:
    """Find the paths that, written with dots, one of the regular expressions matches anywhere.

    Raises InputError for an expression that matches no path, and where they leave nothing to train.
    """
    hits = named(params, patterns)
    if len(hits) == sum(1 for _ in paths(params)):
        raise InputError("frozen_parameters: all parameters match, so nothing would be trained")
    return hits


def named(params: Mapping[str, Any], patterns: str | Sequence[str]) -> frozenset[Path]:
    """Find the paths as `matching` does; all of them may match."""
    all_paths = [path for path, _ in paths(params)]
    dotted = [".".join(path) for path in all_paths]
    matches: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        hits = {path for path, name in zip(all_paths, dotted, strict=True) if re.search(pattern, name)}
        if not hits:
            words = {word for path in all_paths for word in path}
            raise InputError(
                f"frozen_parameters: {pattern!r} matches no parameter.{suggest(pattern, words)} "
                f"The model has {', '.join(dotted[:3])}, …, {dotted[-1]}"
            )
        matches |= hits
    return frozenset(matches)


def split(params: Mapping[str, Any], fixed: frozenset[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split into (leaves whose path is not in `fixed`, leaves whose path is), nested dicts without empty ones."""
    trained: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for path, leaf in paths(params):
        into = rest if path in fixed else trained
        for name in path[:-1]:
            into = into.setdefault(name, {})
        into[path[-1]] = leaf
    return trained, rest


def join(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `split`."""
    joined = dict(first)
    for name, value in second.items():
        joined[name] = join(first[name], value) if name in first else value
    return joined


def by_layer(model: Any, path: Sequence[str], leaf: Any) -> list[tuple[str, str, Any]]:
    """Find the layers of a parameter: (layer, name within it, the index of its part).

    model: the definition, or several by name, which says which layers a stack holds. What is not stacked is one part.
    """
    model = model[path[0]] if isinstance(model, Mapping) else model
    at = path.index("layers") + 1 if "layers" in path[:-1] else 0
    if not at or path[at].isdecimal():
        end = at + 1 if at else len(path) - 1
        return [(".".join(path[:end]), ".".join(path[end:]), ...)]
    stacks = getattr(getattr(model, "config", None), "stacks", {})
    kind = path[at] if path[at] in stacks else ""
    numbers = stacks[kind].layers if kind in stacks else range(leaf.shape[0])
    name = ".".join(path[at + bool(kind) :])
    return [(".".join((*path[:at], str(n))), name, i) for i, n in enumerate(numbers)]
