"""Expand what a user may write into canonical fields, by the table of other names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from rlhf_core.config.options import Component, Options, Problem, format_value
from rlhf_core.config.other_names import TRAINER_NAMES, Ignored

PART_NAMES = ("use_wandb", "wandb_entity", "wandb_name", "extra_optimizer_kwargs")
"""Names that stand for part of a list, or for several entries of a table."""


def expand(
    data: Mapping[str, Any], cls: type[Options], base: Options | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Expand `data` into canonical fields, with problems and warnings. base: the config it will be merged into."""
    table = dict(data)
    problems = _remove_saved_class(table, cls)
    problems += _replace_aliases(table, cls)
    _wrap_single_components(table, cls)
    problems += _remove_ignored(table, cls)
    problems += _nest(table, cls, base)
    problems += _nest_wandb(table, _default(cls, base, "logger"))
    problems += _nest_optimizer(table, _default(cls, base, "optimizer"))
    return table, problems


def _remove_ignored(table: dict[str, Any], cls: type[Options]) -> list[Problem]:
    """Remove names without effect; warn only about values that ask for another behaviour."""
    notes = []
    for name, meaning in cls.other_names().items():
        if name not in table or not isinstance(meaning, Ignored):
            continue
        same = meaning.same
        if name in cls.model_fields:
            if meaning is TRAINER_NAMES.get(name):
                continue  # the trainer has a field of that name
            same = (_default(cls, None, name),)
        if table.pop(name) not in same:
            notes.append(Problem(name, f"has no effect here: {meaning.instead}", fatal=False))
    return notes


def _remove_saved_class(fields: dict[str, Any], cls: type[Options]) -> list[Problem]:
    """Remove the config class that EasyDeL writes into its files; warn if it is another trainer's."""
    key = "trainer_config_class"
    name = fields.pop(key, cls.__name__)
    if name == cls.__name__:
        return []
    return [Problem(key, f"the file is of a {name}, and is read as a {cls.__name__} here", fatal=False)]


def _replace_aliases(fields: dict[str, Any], cls: type[Options]) -> list[Problem]:
    """Replace other spellings by names. Both may be given if they agree, or if one of them is none."""
    problems = []
    for alias, name in cls.aliases().items():
        if alias not in fields or "." in name:
            continue
        value = fields.pop(alias)
        if not _may_be_none(cls, name):  # EasyDeL's none: the default
            if fields.get(name, 0) is None:
                del fields[name]
            if value is None:
                continue
        if name in fields and fields[name] != value:
            problems.append(Problem(alias, f"another name of {name}, which is given too; remove one"))
        fields.setdefault(name, value)
    return problems


def _may_be_none(cls: type[Options], name: str) -> bool:
    return name not in cls.model_fields or type(None) in get_args(cls.model_fields[name].annotation)


def _wrap_single_components(fields: dict[str, Any], cls: type[Options]) -> None:
    """Make a list of one where a name or table is given for a list of components: `logger = "wandb"`."""
    for name, value in fields.items():
        annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
        if get_origin(annotation) is list and isinstance(value, str | Mapping | Component):
            (item,) = get_args(annotation)
            owner = get_args(item)[0] if get_origin(item) is Annotated else item
            if isinstance(owner, type) and issubclass(owner, Component):
                fields[name] = [value]


def _nest(fields: dict[str, Any], cls: type[Options], base: Options | None) -> list[Problem]:
    """Move names such as `epsilon` into their tables; a table that is not given starts from its default."""
    found = [
        (name, *path.split(".", 1)) for name, path in cls.aliases().items() if name in fields and "." in path
    ]
    # Names first: the options of the default do not apply to another component.
    found.sort(key=lambda item: item[2] != "name")
    given = {field: _table(fields[field]) for _, field, _ in found if field in fields}
    tables: dict[str, dict[str, Any]] = {}
    problems = []
    for name, field, key in found:
        value, default = fields.pop(name), _default(cls, base, field)
        if field == "train_data" and value is not None and _table(fields.get(field, default)) is None:
            problems.append(Problem(name, f"needs {field}, one dataset by name or in a table"))
            continue
        if field not in tables:
            start = given[field] if field in given else _table(default) or {}
            if start is None:
                continue  # neither a table nor a name, as validation says
            other = key == "name" and field not in given and value != start.get("name")
            tables[field] = {} if other else dict(start)
        if value is None and (default is None or isinstance(default, Component)):
            continue  # an option that is none counts as not given
        if key in (given.get(field) or {}):
            problems.append(Problem(name, f"the same as {field}.{key}, which is given too; remove one"))
        else:
            tables[field][key] = value
    fields |= {name: table for name, table in tables.items() if table or name in given}
    return problems


def _nest_wandb(fields: dict[str, Any], default: Any) -> list[Problem]:
    """Move `use_wandb` into the list of loggers, and `wandb_entity` and `wandb_name` into the options of wandb."""
    enabled = fields.pop("use_wandb", False)
    named = {"wandb_entity": "entity", "wandb_name": "run_name"}
    options = {key: value for key in named if (value := fields.pop(key, None)) is not None}
    loggers = fields.get("logger", default)
    if not isinstance(enabled, bool):
        return [Problem("use_wandb", f"expected true or false, got {format_value(enabled)}")]
    if not (enabled or options) or not isinstance(loggers, list | tuple):
        return []
    tables: list[Any] = [_table(logger) or logger for logger in loggers]
    wandb_tables = [table for table in tables if isinstance(table, dict) and table.get("name") == "wandb"]
    if enabled and wandb_tables and "logger" in fields:
        return [Problem("use_wandb", "logger names wandb too; remove one")]
    if enabled and not wandb_tables:
        wandb_tables = [{"name": "wandb"}]
        tables += wandb_tables
    if not wandb_tables:
        return [Problem(key, "has no effect without use_wandb = true", fatal=False) for key in options]
    twice = [key for key in options if named[key] in wandb_tables[0] and "logger" in fields]
    wandb_tables[0].update({named[key]: value for key, value in options.items()})
    fields["logger"] = tables
    return [Problem(key, f"the same as {named[key]} of logger wandb; remove one") for key in twice]


def _nest_optimizer(fields: dict[str, Any], default: Any) -> list[Problem]:
    """Move `extra_optimizer_kwargs` into the options of `optimizer`."""
    extra = fields.pop("extra_optimizer_kwargs", None)
    if not extra:
        return []
    if not isinstance(extra, Mapping):
        return [Problem("extra_optimizer_kwargs", f"expected a table, got {format_value(extra)}")]
    table = _table(fields.get("optimizer", default))
    if table is None:
        return []  # neither a table nor a name, as validation says
    twice = [key for key in extra if "optimizer" in fields and key in table]
    fields["optimizer"] = {**table, **extra}
    return [
        Problem(
            f"extra_optimizer_kwargs.{key}", f"the same as optimizer.{key}, which is given too; remove one"
        )
        for key in twice
    ]


def _default(cls: type[Options], base: Options | None, field: str) -> Any:
    if base is not None:
        return getattr(base, field)
    default = cls.model_fields[field].get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def _table(value: Any) -> dict[str, Any] | None:
    """Convert a nested value to a table of what was set; None if it is neither a table nor a name."""
    if isinstance(value, Options):
        return value._table(only_set=True)
    if isinstance(value, str | Path):
        return {"name": str(value)}
    return dict(value) if isinstance(value, Mapping) else None
