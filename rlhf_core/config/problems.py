"""Explain validation errors in the words of the user's file: where, what was wrong, what to type instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rlhf_core.config.other_names import OTHER_NAMES
from rlhf_core.errors import InputError, suggest

if TYPE_CHECKING:
    from pydantic import ValidationError

    from rlhf_core.config.options import Options


class Problem(NamedTuple):
    """path: dotted, such as `rewards[0].weight`. message: the rest of the line. fatal: False for a warning."""

    path: str
    message: str
    fatal: bool = True


_EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "path_type": "a path",
    "callable_type": "a function",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}


def problem_lines(problems: Iterable[Problem], where: str) -> list[str]:
    """Write one line per problem, `where.path: message`, dropping duplicates."""
    return list(dict.fromkeys(f"{join(where, path)}: {message}" for path, message, _ in problems))


def raise_or_warn(problems: Sequence[Problem], where: str) -> None:
    """Raise InputError with every fatal problem; if there is none, warn of each of the others."""
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        raise InputError(*problem_lines(fatal, where))
    for line in problem_lines(problems, where):
        warnings.warn(line, stacklevel=3)


def join(path: str, key: str | int) -> str:
    """Extend a dotted path: `a` and `b` give `a.b`, `a` and 0 give `a[0]`; an empty side changes nothing."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path and key else path or key


def format_value(value: Any) -> str:
    """Write a value as a file would, cut to 60 characters."""
    text = str(value).lower() if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_name(name: str, known: Iterable[str], what: str) -> str:
    """Write `unknown WHAT.` with the closest known name, or with all of them if none is close."""
    names = sorted(set(known))
    return f"unknown {what}." + (
        suggest(name, names) or (f" Known: {', '.join(names)}." if names else " It has none.")
    )


def explain(cls: type[Options], error: ValidationError, data: Mapping[str, Any]) -> list[Problem]:
    """Convert a validation error of `data` to problems, one per place: failed arms of a union are one problem."""
    expected: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    problems = []
    for item in error.errors(include_url=False):
        path, table = _locate(cls, item["loc"], data)
        wanted = _wanted(item, table)
        if wanted is None:
            problems.append(Problem(path, _message(item, table)))
        elif wanted not in expected.setdefault(path, []):
            expected[path].append(wanted)
            inputs[path] = item["input"]
    for path, wants in expected.items():
        if "a number" in wants and "a whole number" in wants:
            wants.remove("a whole number")
        message = f"expected {' or '.join(wants)}, got {format_value(inputs[path])}"
        if isinstance(inputs[path], str):
            choices = [word.strip("'") for want in wants for word in want.split() if word.startswith("'")]
            message += (
                "." + hint if (hint := suggest(inputs[path], (c.rstrip("',") for c in choices))) else ""
            )
            message += f"; write [{format_value(inputs[path])}]" if wants == ["a list"] else ""
        problems.append(Problem(path, message))
    # A problem inside a table says more than that the table fitted no arm of a union.
    return [p for p in problems if not any(q.path.startswith((f"{p.path}.", f"{p.path}[")) for q in problems)]


def _locate(cls: type[Options], loc: Sequence[str | int], data: Any) -> tuple[str, type[Options]]:
    """Convert a location to a dotted path, without pydantic's labels of union arms, and find the table it ends in."""
    path, table, node = "", cls, data
    for position, key in enumerate(loc):
        field = table.model_fields.get(key) if isinstance(key, str) else None
        if isinstance(node, Mapping) and (key in node or (field and position == len(loc) - 1)):
            path, node = join(path, key), node.get(key)
            table = (_table_in(field.annotation) if field else None) or table
        elif isinstance(key, int) and isinstance(node, list | tuple) and key < len(node):
            path, node = join(path, key), node[key]
    return path, table


def _table_in(annotation: Any) -> type[Options] | None:
    """Find the options class inside an annotation such as `list[X] | None`."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return annotation
    return next(filter(None, map(_table_in, get_args(annotation))), None)


def _wanted(item: Any, table: type[Options]) -> str | None:
    """Describe the expected value, if that explains the error; else None."""
    kind = item["type"]
    if kind == "literal_error":
        return str(item["ctx"]["expected"])
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"a number {words} {item['ctx'][key]:g}"
    if kind == "model_type" and table.model_config.get("extra") == "allow":
        return "a name or a table"  # a component
    return _EXPECTED.get(kind)


def _message(item: Any, table: type[Options]) -> str:
    kind = item["type"]
    if kind == "extra_forbidden":
        name = str(item["loc"][-1])
        ours = table.ELSEWHERE.get(name, "")
        if ours.partition(".")[0] in table.model_fields:
            return f"unknown field. What TRL calls so is {ours} here"
        ours = OTHER_NAMES.get(name, "")
        if ours.partition(".")[0] in table.model_fields:
            return f"unknown field. Write {ours}"
        if name in table.ABSENT:
            return f"unknown field. It is TRL's; here {table.ABSENT[name]}"
        return unknown_name(name, table.names(), "field")
    if kind == "missing":
        return "missing; it has no default"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    return f"{item['msg']}, got {format_value(item['input'])}"
