"""Split parameters into trained and fixed ones, two nested dicts, and join them again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

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


class Named(NamedTuple):
    """The parameters that regular expressions name.

    whole: paths of those that are named with all of their layers. layers: of stacks named in part, the indices along
    the first axis. absent: the alternatives that name nothing, each with the expression that it is a part of.
    """

    whole: frozenset[Path]
    layers: dict[Path, tuple[int, ...]]
    absent: list[tuple[str, str]]


def matching(params: Mapping[str, Any], patterns: str | Sequence[str], model: Any = None) -> Named:
    """Find the parameters that regular expressions name, of which some must be left to train.

    Raises InputError for an expression that names none, and where they leave nothing to train.
    """
    found = named(params, patterns, model)
    if len(found.whole) == sum(1 for _ in paths(params)):
        raise InputError("frozen_parameters: all parameters match, so nothing would be trained")
    return found


def named(
    params: Mapping[str, Any],
    patterns: str | Sequence[str],
    model: Any = None,
    field: str = "frozen_parameters",
    what: str = "parameter",
) -> Named:
    """Find the parameters that regular expressions name; all of them may be named.

    An expression is found anywhere in a dotted path. A layer's path has its number, "layers.0.mlp.up_proj.kernel", and
    the path of all layers has none, "layers.mlp.up_proj.kernel". An alternative of an expression with a number means
    the former. One without means the latter, or the former where the latter has no match.

    model: see `by_layer`. field, what: for messages. Raises InputError for an expression that names none.
    """
    parts = [
        (path, index, ".".join(path), name)
        for path, leaf in paths(params)
        for name, index in numbered(model, path, leaf)
    ]
    chosen: dict[Path, set[Any]] = {}
    absent: list[tuple[str, str]] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found, lost = search(pattern, lambda each: _found(each, parts))
        if not found:
            raise InputError(f"{field}: '{pattern}' matches no {what}.{_what_there_is(pattern, parts)}")
        absent += [(each, pattern) for each in lost]
        for path, index in found:
            chosen.setdefault(path, set()).add(index)
    counts = Counter(path for path, *_ in parts)
    whole = frozenset(path for path, indices in chosen.items() if len(indices) == counts[path])
    some = {path: tuple(sorted(chosen[path])) for path in chosen if path not in whole}
    return Named(whole, some, absent)


def _what_there_is(pattern: str, parts: Sequence[tuple[Path, Any, str, str]]) -> str:
    """Name parameters, for a message about an expression that matches none."""
    words = {word for path, *_ in parts for word in path}
    names = [name for *_, name in parts]
    return f"{suggest(pattern, words)} The model has {', '.join(names[:3])}, …, {names[-1]}"


def search(pattern: str, find: Callable[[str], set[Any]]) -> tuple[set[Any], list[str]]:
    """Find what the alternatives of an expression name: (all of it, the alternatives that name nothing).

    find: what an expression names that is one of them.
    """
    found: set[Any] = set()
    absent: list[str] = []
    for each in alternatives(pattern):
        hits = find(each)
        for part, alone in inner_alternatives(each):
            of_part = find(alone)
            if hits and not of_part:
                absent.append(part)
            hits = hits | of_part
        if not hits:
            absent.append(each)
        found |= hits
    return found, absent


def _found(alternative: str, parts: Sequence[tuple[Path, Any, str, str]]) -> set[tuple[Path, Any]]:
    """Find the parts that one alternative of an expression names. parts: (path, index, dotted path, with a number)."""
    expression = re.compile(alternative)
    of_layers = {(path, index) for path, index, _, name in parts if expression.search(name)}
    if has_number(alternative):
        return of_layers
    return {(path, index) for path, index, dotted, _ in parts if expression.search(dotted)} or of_layers


def has_number(expression: str) -> bool:
    """Whether a number is in an expression, or a class of digits; one in a name, such as "conv1d", is none."""
    return re.search(r"(?<![A-Za-z_])\d|\\d", expression) is not None


def absent_lines(absent: Sequence[tuple[str, str]], what: str = "parameter") -> list[str]:
    """Describe the alternatives that name nothing, in a line each."""
    return [f"'{part}' in '{pattern}' matches no {what}" for part, pattern in absent]


def alternatives(pattern: str) -> list[str]:
    """Split a regular expression at the bars outside of its groups."""
    bars = _groups(pattern)[0].bars
    parts = [pattern[start:end] for start, end in _between(0, bars, len(pattern))]
    flags = re.match(r"\(\?[aiLmsux]+\)", pattern)
    return parts if flags is None else [parts[0], *(flags[0] + part for part in parts[1:])]


def inner_alternatives(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield every alternative of the groups of an expression, with the expression that has it alone in its group."""
    for group in _groups(pattern)[1:]:
        for start, end in _between(group.start, group.bars, group.end) if group.bars else ():
            alone = pattern[: group.start] + pattern[start:end] + pattern[group.end :]
            yield pattern[start:end], alone


class _Group(NamedTuple):
    """A group of an expression: where its content starts and ends, and the bars in it, groups within it left out."""

    start: int
    bars: list[int]
    end: int


def _groups(pattern: str) -> list[_Group]:
    """Find the groups of an expression; first the whole. What must not match is left out."""
    groups = [_Group(0, [], len(pattern))]
    open_groups: list[tuple[int, list[int]]] = [(0, groups[0].bars)]
    for mark in _MARKS.finditer(pattern):
        if mark[0].startswith("("):
            open_groups.append((mark.end(), []))
        elif mark[0] == "|":
            open_groups[-1][1].append(mark.start())
        elif mark[0] == ")":
            start, bars = open_groups.pop()
            if not pattern[:start].endswith(("(?!", "(?<!")):
                groups.append(_Group(start, bars, mark.start()))
    return groups


_MARKS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|<?[=!]|[\w-]*:))?|\||\)", re.DOTALL)
"""What splits an expression into groups and alternatives, and what may hold the same marks: escapes, sets."""


def _between(start: int, bars: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Return (start, end) of the texts between bars."""
    return list(zip([start, *(bar + 1 for bar in bars)], [*bars, end], strict=True))


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
    if not at or path[at].isdecimal() or not getattr(leaf, "shape", ()):
        end = at + 1 if at else len(path) - 1
        return [(".".join(path[:end]), ".".join(path[end:]), ...)]
    stacks = getattr(getattr(model, "config", None), "stacks", {})
    kind = path[at] if path[at] in stacks else ""
    numbers = stacks[kind].layers if kind in stacks else range(leaf.shape[0])
    name = ".".join(path[at + bool(kind) :])
    return [(".".join((*path[:at], str(n))), name, i) for i, n in enumerate(numbers)]


def numbered(model: Any, path: Path, leaf: Any) -> list[tuple[str, Any]]:
    """Name the layers of a parameter: (dotted path with the layer's number, the index of its part), see `by_layer`."""
    return [
        (".".join(filter(None, (layer, name))), index) for layer, name, index in by_layer(model, path, leaf)
    ]


Layers: TypeAlias = tuple[tuple[Path, tuple[int, ...]], ...]
"""Some layers of stacks: (path, indices along the first axis)."""


def without_layers(params: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """Leave out layers of stacks."""
    if not layers:
        return dict(params)
    return changed(params, dict(layers), lambda leaf, indices: leaf[_others(leaf, indices)])


def with_layers(params: Mapping[str, Any], others: Mapping[str, Any], layers: Layers) -> dict[str, Any]:
    """Take these layers of stacks from `params`, and all else from `others`, where `without_layers` left them out."""
    if not layers:
        return dict(others)
    old = dict(paths(params))
    whole = {path: (old[path], _others(old[path], indices)) for path, indices in layers}
    return changed(others, whole, lambda leaf, into: into[0].at[into[1]].set(leaf))


def _others(leaf: Any, indices: Sequence[int]) -> np.ndarray:
    return np.setdiff1d(np.arange(leaf.shape[0]), indices)


def changed(
    params: Mapping[str, Any], of: Mapping[Path, Any], change: Callable[[Any, Any], Any], above: Path = ()
) -> dict[str, Any]:
    """Change the leaves at the paths of `of`: leaf, of[path] → leaf."""
    result = {}
    for name, value in params.items():
        path = (*above, name)
        if isinstance(value, Mapping):
            result[name] = changed(value, of, change, path)
        else:
            result[name] = change(value, of[path]) if path in of else value
    return result
