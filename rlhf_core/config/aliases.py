"""Other names of fields: those that a class declares, and those that plugins translate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic_core import PydanticUndefined

from rlhf_core.config.options import Component, Expanded, Options, Problem, format_value
from rlhf_core.config.paths import table_in
from rlhf_core.config.translation import Alias, Names, NoEffect, Refused, installed


class Typed(NamedTuple):
    """A name as it was typed, and the value of the field that it stands for.

    field: the first part of the path. key: the rest of it, empty where the name stands for the whole field.
    """

    name: str
    field: str
    key: str
    value: Any
    wins: bool


def expand(
    cls: type[Options], data: Mapping[str, Any], base: Options | None, registry: Names | None
) -> Expanded:
    """Replace the other names in `data` by fields.

    base: the config that the result will be merged into; None: the defaults.
    registry: translates keys that `cls` does not know; None: the one of everything that is installed, if there are any.
    """
    table = dict(data)
    aliases = cls.aliases()
    unknown = {
        key: value for key, value in table.items() if key not in cls.model_fields and key not in aliases
    }
    typed = [_typed(name, Alias(path, table.pop(name))) for name, path in aliases.items() if name in table]
    problems: list[Problem] = []
    if unknown:
        known = {key: value for key, value in data.items() if key not in unknown}
        translated, problems = _translate(cls, unknown, known, base, registry)
        for key, names in translated.items():
            del table[key]
            typed += names
    _wrap_single_components(table, cls)
    problems += _place(table, typed, cls, base)
    problems += _drop_unused(table, cls)
    return Expanded(table, problems, {_path(each): each.name for each in typed if each.value is not None})


def _typed(name: str, alias: Alias) -> Typed:
    field, _, key = alias.path.partition(".")
    return Typed(name, field, key, alias.value, alias.wins)


def _path(typed: Typed) -> str:
    return f"{typed.field}.{typed.key}" if typed.key else typed.field


def _translate(
    cls: type[Options],
    unknown: Mapping[str, Any],
    known: Mapping[str, Any],
    base: Options | None,
    registry: Names | None,
) -> tuple[dict[str, list[Typed]], list[Problem]]:
    """Ask plugins for keys that `cls` does not know; return what they stand for, and what is said of them."""
    registry = installed() if registry is None else registry
    answers = None if registry is None else registry.translate(cls, unknown, known, base)
    typed: dict[str, list[Typed]] = {}
    problems = []
    for key, answer in (answers or {}).items():
        typed[key] = []
        if isinstance(answer, Refused):
            problems.append(Problem(key, answer.message))
        elif isinstance(answer, NoEffect):
            if answer.why:
                problems.append(Problem(key, f"has no effect here: {answer.why}", fatal=False))
        else:
            aliases = [answer] if isinstance(answer, Alias) else answer
            typed[key] = [_typed(key, alias) for alias in aliases]
    return typed, problems


def _wrap_single_components(fields: dict[str, Any], cls: type[Options]) -> None:
    """Make a list of one where a name or table is given for a list of components: `logger = "wandb"`."""
    for name, value in fields.items():
        if _lists_components(cls, name) and isinstance(value, str | Mapping | Component):
            fields[name] = [value]


def _lists_components(cls: type[Options], name: str) -> bool:
    annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
    if get_origin(annotation) is not list:
        return False
    (item,) = get_args(annotation)
    owner = get_args(item)[0] if get_origin(item) is Annotated else item
    return isinstance(owner, type) and issubclass(owner, Component)


def _place(
    fields: dict[str, Any], typed: list[Typed], cls: type[Options], base: Options | None
) -> list[Problem]:
    """Put values into the fields that they stand for: whole fields, entries of tables, then those that win."""
    problems = []
    for each in typed:
        if not each.key and not each.wins:
            problems += _place_field(fields, each, cls)
    inner: dict[str, list[Typed]] = {}
    for each in typed:
        if each.key and not each.wins:
            inner.setdefault(each.field, []).append(each)
    for field, entries in inner.items():
        place = _place_in_list if _lists_components(cls, field) else _place_in_table
        problems += place(fields, entries, cls, _default(cls, base, field))
    for each in typed:
        if each.wins:
            fields[each.field] = each.value
    return problems


def _place_field(fields: dict[str, Any], typed: Typed, cls: type[Options]) -> list[Problem]:
    """Set a field. Both names may be given if they agree, or if one of them is none."""
    name, field, value = typed.name, typed.field, typed.value
    given = fields.get(field)
    if value is None and (given is not None or not _may_be_none(cls, field)):
        return []
    if given is not None and given != value:
        return [Problem(name, f"another name for {field}, which is also given; remove one")]
    fields[field] = value
    return []


def _may_be_none(cls: type[Options], field: str) -> bool:
    return type(None) in get_args(cls.model_fields[field].annotation)


def _place_in_table(
    fields: dict[str, Any], entries: list[Typed], cls: type[Options], default: Any
) -> list[Problem]:
    """Set entries of a table; one that is not given starts from its default, unless another component is named."""
    field = entries[0].field
    is_given = field in fields
    start = _table(fields[field] if is_given else default)
    if start is None and table_in(cls.model_fields[field].annotation) is None:
        set_names = [each.name for each in entries if each.value is not None]
        return [Problem(name, f"needs {field}, one dataset by name or in a table") for name in set_names]
    if start is None and is_given:
        return []  # neither a table nor a name, as validation says
    table = dict(start or {})
    given_keys = set(table) if is_given else set()
    if not is_given and _names_another(entries, table):
        table = {}  # the default's options do not apply to another component
    problems = []
    none_is_unset = default is None or isinstance(default, Component)
    for each in entries:
        if each.value is None and none_is_unset:
            continue
        if each.key in given_keys:
            message = f"the same as {field}.{each.key}, which is also given; remove one"
            problems.append(Problem(each.name, message))
            continue
        table[each.key] = each.value
    if table or is_given:
        fields[field] = table
    return problems


def _names_another(entries: list[Typed], table: Mapping[str, Any]) -> bool:
    """Return whether the entries name another component than the table does."""
    names = [each.value for each in entries if each.key == "name" and each.value is not None]
    return bool(names) and names[0] != table.get("name")


def _place_in_list(
    fields: dict[str, Any], entries: list[Typed], cls: type[Options], default: Any
) -> list[Problem]:
    """Add components to a list, where `logger.wandb` is true, and set their options, `logger.wandb.entity`."""
    field = entries[0].field
    components = fields.get(field, default)
    if not isinstance(components, list | tuple):
        return []  # as validation says
    tables = [_table(each) or each for each in components]
    given = [dict(table) for table in tables if isinstance(table, dict)] if field in fields else []
    problems = []

    def find_or_add(name: str) -> dict[str, Any]:
        """Find a component in the list that the field gets, or add it."""
        fields[field] = tables
        found = _named(tables, name)
        if found is None:
            found = {"name": name}
            tables.append(found)
        return found

    for each in sorted(entries, key=lambda entry: "." in entry.key):
        name, _, option = each.key.partition(".")
        own = _named(given, name)
        if option:
            if own is not None and option in own:
                problems.append(Problem(each.name, f"the same as {option} of {field} {name}; remove one"))
            find_or_add(name)[option] = each.value
        elif not isinstance(each.value, bool):
            problems.append(Problem(each.name, f"expected true or false, got {format_value(each.value)}"))
        elif each.value:
            if own is not None:
                problems.append(Problem(each.name, f"{field} also names {name}; remove one"))
            find_or_add(name)
    return problems


def _named(tables: Iterable[Any], name: str) -> dict[str, Any] | None:
    """Return the first of the tables that has this name."""
    return next((table for table in tables if isinstance(table, dict) and table.get("name") == name), None)


def _drop_unused(fields: dict[str, Any], cls: type[Options]) -> list[Problem]:
    """Remove shared fields that a trainer does not use; warn of values that are not their defaults."""
    problems = []
    for name, why in cls.unused_fields().items():
        if name in fields and fields.pop(name) != _default(cls, None, name):
            problems.append(Problem(name, f"has no effect here: {why}", fatal=False))
    return problems


def _default(cls: type[Options], base: Options | None, field: str) -> Any:
    if base is not None:
        return getattr(base, field)
    default = cls.model_fields[field].get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def _table(value: Any) -> dict[str, Any] | None:
    """Convert a nested value to a table of what was set; None if it is not a table or a name."""
    if isinstance(value, Options):
        return value._table(only_set=True)
    if isinstance(value, str | Path):
        return {"name": str(value)}
    return dict(value) if isinstance(value, Mapping) else None
