"""The base of every configuration class, and the component: a name with options.

Strict: text is never read as a number and true is never 1; but a whole number is accepted as a number, and a list as
a tuple, since files have no tuples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema

from rlhf_core.config.paths import table_in
from rlhf_core.config.translation import INSTALL, Names, Refused, installed
from rlhf_core.errors import InputError, suggest, warn
from rlhf_core.hidden import hide_named


def _plain(value: Any) -> Any:
    """Convert options to types that a file holds, so that a config equals its copy read from JSON."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _accept_lists(schema: Any) -> None:
    """Make a schema accept lists for tuples and sets, and text for paths; items stay strict."""
    if isinstance(schema, list | tuple):
        for item in schema:
            _accept_lists(item)
    elif isinstance(schema, dict):
        if schema.get("type") in ("tuple", "set", "frozenset", "lax-or-strict"):
            schema["strict"] = False
        for key, item in schema.items():
            if key not in ("default", "expected", "metadata"):
                _accept_lists(item)


class Options(BaseModel):
    """A frozen, strict table of options; extend it and annotate fields.

    Raises InputError, one line per problem, if it is built with values that do not fit.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    ALIASES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {}
    """{another name: the dotted path that it stands for}, of a field, or of an entry of its table; or the path and the
    value that is read under that name where a component does not set it. Adds to the parent class's."""
    UNUSED_FIELDS: ClassVar[Mapping[str, str]] = {}
    """{a field of the parent class that this one does not use: what happens instead}: setting it is a warning."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Hide texts under names such as `api_key` where the options are printed."""
        for name, value in super().__repr_args__():
            yield name, hide_named(name or "", value)

    def __init__(self, /, **data: Any) -> None:
        fields, problems, typed = self._expand(data)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problems += explain(type(self), error, fields, installed)
        problems += _not_finite(fields)
        raise_or_warn(as_typed(problems, typed, data), type(self).__name__)

    # pydantic then builds nested tables without this method, so that their problems are collected with the others.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _accept_lists(schema)
        return schema

    @classmethod
    def _expand(
        cls, data: Mapping[str, Any], base: Self | None = None, registry: Names | None = None
    ) -> Expanded:
        """Convert the given data to its canonical form.

        base: the configuration it will be merged into; None: the defaults. registry: translates names.
        """
        return Expanded(dict(data), [], {})

    @classmethod
    def _merged(cls, table: str) -> dict[str, Any]:
        """Merge a table of this class with those of its parents."""
        merged: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            merged |= vars(base).get(table, {})
        return merged

    @classmethod
    def aliases(cls) -> dict[str, str]:
        """Return {another name: the dotted path that it stands for}."""
        declared = cls._merged("ALIASES")
        return {name: path if isinstance(path, str) else path[0] for name, path in declared.items()}

    @classmethod
    def unused_fields(cls) -> dict[str, str]:
        """Return {field that is not used: what happens instead}."""
        return cls._merged("UNUSED_FIELDS")

    @classmethod
    def names(cls) -> list[str]:
        """List every name that may be given."""
        return [*cls.model_fields, *cls.aliases()]

    def to_dict(self) -> dict[str, Any]:
        """Convert every field to nested dicts of JSON types."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build from a dict that `to_dict` returned, or part of one; raises InputError."""
        return cls(**data)

    def to_json(self, indent: int | None = 2) -> str:
        """Write `to_dict` as JSON text; indent: spaces a level, None for a single line."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build from text that `to_json` returned; raises InputError."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{cls.__name__}: not JSON: {error}") from None
        if not isinstance(data, dict):
            raise InputError(f"{cls.__name__}: expected a JSON object, got {type(data).__name__}")
        return cls(**data)

    def replace(self, **changes: Any) -> Self:
        """Copy with some fields changed; those left at their defaults stay so. Raises InputError."""
        fields, problems, _ = self._expand(changes, self)
        raise_or_warn(problems, type(self).__name__)
        return type(self)(**{**self._table(only_set=True), **fields})

    def _table(self, *, only_set: bool = False) -> dict[str, Any]:
        """Return the fields, one level deep; only_set: without those left at their defaults."""
        names = type(self).model_fields
        return {name: getattr(self, name) for name in names if not only_set or name in self.model_fields_set}


class Component(Options):
    """A component by name, `{ name = "dapo", epsilon = 0.2 }`; just "dapo" where it needs no options.

    A field declares the kind that it holds: `loss: Annotated[Component, POLICY_LOSS] = Component(name="dapo")`.
    `build` checks the options with a registry. An entry of the same table that is the trainer's, not the component's,
    is a field of a subclass: `class WeightedReward(Component): weight: float = 1.0`.
    """

    model_config = ConfigDict(extra="allow")
    name: str

    @model_validator(mode="before")
    @classmethod
    def _canonical(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, Mapping):
            return {key: _plain(value) for key, value in data.items()}
        return data

    @property
    def options(self) -> dict[str, Any]:
        """The component's own options: everything but the declared fields."""
        return dict(self.__pydantic_extra__ or {})

    def _table(self, *, only_set: bool = False) -> dict[str, Any]:
        return {**super()._table(only_set=only_set), **self.options}


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


def _not_finite(value: Any, path: str = "") -> Iterator[Problem]:
    """Find numbers that are not finite, also where a field takes any value: no record of a run could hold them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"expected {_EXPECTED['finite_number']}, got {format_value(value)}")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _not_finite(item, join(path, str(name)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _not_finite(item, f"{path}[{number}]")


def explain(
    cls: type[Options],
    error: ValidationError,
    data: Mapping[str, Any],
    names: Callable[[], Names | None] | None = None,
) -> list[Problem]:
    """Convert a validation error of `data` to problems, one per place: failed arms of a union are one problem.

    names: opens the registry that is asked what unknown fields mean.
    """
    expected: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    problems = []
    for item in error.errors(include_url=False):
        path, table = _locate(cls, item["loc"], data)
        wanted = _wanted(item, table)
        if wanted is None:
            problems.append(Problem(path, _message(item, table, names)))
        elif wanted not in expected.setdefault(path, []):
            expected[path].append(wanted)
            inputs[path] = item["input"]
    for path, wants in expected.items():
        problems.append(Problem(path, _unexpected(wants, inputs[path])))
    # A problem inside a table says more than that the table fitted no arm of a union.
    telling = []
    for problem in problems:
        below = (f"{problem.path}.", f"{problem.path}[")
        if not any(other.path.startswith(below) for other in problems):
            telling.append(problem)
    return telling


def _unexpected(wants: Sequence[str], given: Any) -> str:
    """Write what was expected in place of a value, and what a text probably means."""
    if "a number" in wants:
        wants = [want for want in wants if want != "a whole number"]
    message = f"expected {_either(wants)}, got {format_value(given)}"
    if not isinstance(given, str):
        return message
    quoted = [word for word in " ".join(wants).split() if word.startswith("'")]
    hint = suggest(given, [word.strip("'").rstrip("',") for word in quoted])
    if hint:
        message += f".{hint}"
    if wants == ["a list"]:
        message += f"; write [{format_value(given)}]"
    return message


def _either(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _locate(cls: type[Options], loc: Sequence[str | int], data: Any) -> tuple[str, type[Options]]:
    """Convert a location to a dotted path, without pydantic's labels of union arms, and find the table it ends in."""
    path, table, node = "", cls, data
    for position, key in enumerate(loc):
        field = table.model_fields.get(key) if isinstance(key, str) else None
        if isinstance(node, Mapping) and (key in node or (field and position == len(loc) - 1)):
            path = join(path, key)
            node = node.get(key)
            table = (table_in(field.annotation) if field else None) or table
        elif isinstance(key, int) and isinstance(node, list | tuple) and key < len(node):
            path = join(path, key)
            node = node[key]
    return path, table


def bound_text(bound: float) -> str:
    """Write the limit of a field: whole numbers with all their digits, others shortened."""
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _wanted(item: Any, table: type[Options]) -> str | None:
    """Describe the expected value, if that explains the error; else None."""
    kind = item["type"]
    if kind == "literal_error":
        return str(item["ctx"]["expected"])
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"a number {words} {bound_text(item['ctx'][key])}"
    if kind == "model_type" and table.model_config.get("extra") == "allow":
        return "a name or a table"  # a component
    if kind == "string_too_short" and item["ctx"]["min_length"] == 1:
        return "text that is not empty"
    return _EXPECTED.get(kind)


def _message(item: Any, table: type[Options], names: Callable[[], Names | None] | None) -> str:
    kind = item["type"]
    if kind == "extra_forbidden":
        name = str(item["loc"][-1])
        registry = None if names is None else names()
        answers = None if registry is None else registry.translate(table, {name: item["input"]}, {}, None)
        answer = (answers or {}).get(name)
        if isinstance(answer, Refused):
            return answer.message
        message = unknown_name(name, table.names(), "field")
        nobody_translates = names is not None and answers is None and len(item["loc"]) == 1
        return f"{message} {INSTALL}" if nobody_translates else message
    if kind == "missing":
        return "missing; it has no default"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    return f"{item['msg']}, got {format_value(item['input'])}"


class Expanded(NamedTuple):
    """Data in canonical form. typed: {dotted path: the other name that was typed for it}."""

    fields: dict[str, Any]
    problems: list[Problem]
    typed: dict[str, str]


MOST_LISTED = 25
"""Known names that a message lists."""


class Problem(NamedTuple):
    """path: dotted, such as `rewards[0].weight`. message: the rest of the line. fatal: False for a warning."""

    path: str
    message: str
    fatal: bool = True


def as_typed(problems: Iterable[Problem], typed: Mapping[str, str], data: Mapping[str, Any]) -> list[Problem]:
    """Put the name that was typed before the field that it stands for: `clip_grad (here max_grad_norm)`.

    typed: {dotted path: name}. data: as it was given.
    """

    def named(problem: Problem) -> Problem:
        for path, name in typed.items():
            below = problem.path.removeprefix(path)
            top, _, key = path.partition(".")
            table = data.get(top) if key else None
            written = key in table if isinstance(table, Mapping) else top in data
            if below != problem.path and below[:1] in ("", ".", "[") and not written:
                return problem._replace(path=f"{name}{below} (here {problem.path})")
        return problem

    return [named(problem) for problem in problems]


def problem_lines(problems: Iterable[Problem], where: str) -> list[str]:
    """Write one line per problem, `where.path: message`, dropping duplicates."""
    return list(dict.fromkeys(f"{join(where, path)}: {message}" for path, message, _ in problems))


def raise_or_warn(problems: Sequence[Problem], where: str) -> None:
    """Raise InputError with every fatal problem; if there is none, warn of each of the others."""
    fatal = [problem for problem in problems if problem.fatal]
    if fatal:
        raise InputError(*problem_lines(fatal, where))
    for line in problem_lines(problems, where):
        warn(line)


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
    """Write `unknown WHAT.` with the closest known name, or with all of them, of many the nearest, if none is close."""
    names = sorted(set(known))
    hint = suggest(name, names)
    if hint:
        return f"unknown {what}.{hint}"
    if len(names) > MOST_LISTED:
        nearest = get_close_matches(name, names, 5, 0.0)
        return f"unknown {what}. Nearest of {len(names)}: {', '.join(nearest)}."
    return f"unknown {what}." + (f" Known: {', '.join(names)}." if names else " It has none.")
