"""Build a configuration from a table of a file or flags, reporting all problems together."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlhf_core.config.options import (
    Component,
    Options,
    Problem,
    as_typed,
    bound_text,
    explain,
    join,
    raise_or_warn,
)
from rlhf_core.config.toml import parse_toml
from rlhf_core.config.trainer import TrainerConfig
from rlhf_core.config.translation import Names, installed
from rlhf_core.contracts import Kind

C = TypeVar("C", bound=Options)


def build(cls: type[C], data: Mapping[str, Any], *, where: str = "", registry: Names | None = None) -> C:
    """Build a configuration from a table.

    where: prefix of the field in messages, such as "stage 'policy'".
    registry: checks the names and options of components; None leaves them unchecked.
    Raises InputError with one line for every unknown field, wrong type, value out of range, name given twice, and
    unknown component or option.
    """
    canonical, problems, typed = cls._expand(data, None, registry)
    config = None
    try:
        config = cls.model_validate(canonical)
    except ValidationError as error:
        problems += explain(cls, error, canonical, installed if registry is None else lambda: registry)
    if registry is not None:
        problems += component_problems(components(cls, canonical), registry)
    raise_or_warn(as_typed(problems, typed, data), where)
    assert config is not None
    return config


def field_values(cls: type[Options], data: Mapping[str, Any], registry: Names | None) -> dict[str, Any]:
    """Return the fields that a table sets, under their own names, unchecked."""
    return cls._expand(data, None, registry).fields


Found = tuple[str, Kind[Any], type[Component], dict[str, Any]]


def component_problems(found: Iterable[Found], registry: Names) -> list[Problem]:
    """Check the names and options of components."""
    problems = []
    for path, kind, owner, component in found:
        options = {key: value for key, value in component.items() if key not in owner.model_fields}
        wrong = registry.check(kind, component["name"], options, also=list(owner.model_fields))
        problems += [Problem(join(path, below), message) for below, message in wrong]
    return problems


def components(cls: type[Options], table: Mapping[str, Any]) -> Iterator[Found]:
    """Yield (dotted path, kind, class, {name, ...}) of every component in a table of `cls`, defaults included.

    Skips entries that are not components, which validation reports.
    """
    for name, field in cls.model_fields.items():
        value = table[name] if name in table else field.get_default(call_default_factory=True)
        yield from _walk(_annotation(field), value, name)


def _walk(annotation: Any, value: Any, path: str) -> Iterator[Found]:
    """Yield the components in the value of one annotation, as `components`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind = _kind_in(arguments)
        if kind is None:
            yield from _walk(arguments[0], value, path)
            return
        component = _component(value, arguments[0])
        if component is not None:
            yield path, kind, arguments[0], component
    elif origin in (Union, UnionType):
        for arm in arguments:
            yield from _walk(arm, value, path)
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from _walk(arguments[0], item, join(path, index))
    elif _is_table(annotation) and isinstance(value, Mapping | Options):
        for below, kind, owner, component in components(annotation, dict(value)):
            yield join(path, below), kind, owner, component


def _kind_in(arguments: Sequence[Any]) -> Kind[Any] | None:
    """Return the kind of component that `Annotated[...]` with these arguments holds; None if it holds none."""
    return next((note for note in arguments[1:] if isinstance(note, Kind)), None)


def _is_table(annotation: Any) -> bool:
    """Whether an annotation is a class of options."""
    return isinstance(annotation, type) and issubclass(annotation, Options)


def _component(value: Any, owner: type[Component]) -> dict[str, Any] | None:
    if isinstance(value, Component):
        return {**dict(value), **value.options}
    table = {"name": value} if isinstance(value, str) else value
    usual = owner.model_fields["name"].default
    if isinstance(table, Mapping) and isinstance(usual, str):
        table = {"name": usual, **table}
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        return None
    return table if isinstance(table, dict) else dict(table)


def _annotation(field: FieldInfo) -> Any:
    """Restore the kinds that pydantic strips from the outermost layer of a field's annotation."""
    notes = tuple(note for note in field.metadata if isinstance(note, Kind))
    return Annotated[(field.annotation, *notes)] if notes else field.annotation


class FieldDoc(NamedTuple):
    """One line of a field list: type in words; default as in `to_dict`; description with units.

    bounds: such as `, > 0, ≤ 1`, to follow the type.
    """

    name: str
    type: str
    default: Any
    description: str
    bounds: str = ""


def fields(cls: type[Options]) -> list[FieldDoc]:
    """Document the fields of a configuration class, then the flat names that stand for nested ones."""
    rows = []
    for name, field in cls.model_fields.items():
        words = _words(_annotation(field))
        about = field.description or ""
        rows.append(FieldDoc(name, words, _default(field), about, _bounds(field)))
    if issubclass(cls, TrainerConfig):
        for name, path in cls.aliases().items():
            nested, dot, key = path.partition(".")
            if not dot or name in TrainerConfig.ALIASES:
                continue
            declared = cls._merged("ALIASES")[name]
            default = declared[1:] if isinstance(declared, tuple) else ()
            inner = getattr(cls.model_fields[nested].annotation, "model_fields", {}).get(key)
            words = _words(_annotation(inner)) if inner else "option"
            value = default[0] if default else (_default(cls.model_fields[nested]) or {}).get(key)
            limits = _bounds(inner) if inner else ""
            rows.append(FieldDoc(name, words, value, f"short for {nested}.{key}", limits))
    return rows


def _bounds(field: FieldInfo) -> str:
    """Describe a field's limits."""
    limits = [
        f", {sign} {bound_text(getattr(note, name))}"
        for note in field.metadata
        for name, sign in _SIGNS.items()
        if isinstance(getattr(note, name, None), int | float)
    ]
    return "".join(limits)


def _default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return None
    return default.to_dict() if isinstance(default, Options) else default


_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Any: "anything",
}


def _words(annotation: Any) -> str:
    """Describe an annotation for the reader of a manual."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind = _kind_in(arguments)
        return kind.name if kind else _words(arguments[0])
    if origin is Literal:
        choices = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in arguments]
        return " | ".join(choices)
    if origin in (list, tuple, Sequence):
        return "list" if arguments[0] is Any else f"list of {_words(arguments[0])}"
    if annotation in _WORDS:
        return _WORDS[annotation]
    if annotation is None or annotation is type(None):
        return "none"
    if origin is Callable:
        return "function"
    if origin is dict or _is_table(annotation):
        return "table"
    if arguments:
        return " | ".join(map(_words, arguments))
    return str(getattr(annotation, "__name__", annotation))


def parse_value(text: str) -> Any:
    """Parse the value of `--set field=VALUE`: a TOML literal, none, or else the text itself."""
    if text.strip().lower() == "none":
        return None
    try:
        table = parse_toml(f"value = {text}")
    except (ValueError, RecursionError):  # not TOML, a number of thousands of digits, or nested too deeply
        return text
    value = table.pop("value")
    return text if table or isinstance(value, datetime.date | datetime.time) else value
