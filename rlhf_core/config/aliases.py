"""From what a user may write to the canonical fields: other names, flat names, names that stand for part of a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from rlhf_core.config.options import Component, Options
from rlhf_core.config.other_names import SEED_FIELDS
from rlhf_core.config.problems import Problem, format_value

if TYPE_CHECKING:
    from rlhf_core.config.trainer import TrainerConfig

PART_NAMES = ("use_wandb", "wandb_entity", "wandb_name", "dataset_split", "extra_optimizer_kwargs")
"""Names that are no fields and stand for part of one."""

SAVED_BY = "trainer_config_class"
"""Where a file saved by EasyDeL names the class of its config."""


def expand(
    data: Mapping[str, Any], cls: type[TrainerConfig], base: TrainerConfig | None
) -> tuple[dict[str, Any], list[Problem]]:
    """What was given, canonical, and what is wrong with it or to be said of it. base: what it will be merged into."""
    given = dict(data)
    problems = [*_saved_by(given, cls), *_aliases(given, cls)]
    _single_components(given, cls)
    problems += _without_effect(given, cls)
    problems += _flat_names(given, cls, base)
    problems += _wandb(given, _default(cls, base, "logger"))
    problems += _split(given, _default(cls, base, "train_data"))
    problems += _optimizer(given, _default(cls, base, "optimizer"))
    return given, problems


def inherit(cls: type, attribute: str) -> dict[str, Any]:
    """A class attribute's entries and those of the parents', the nearest first."""
    tables = [vars(base)[attribute] for base in reversed(cls.__mro__) if attribute in vars(base)]
    return {name: entry for table in tables for name, entry in table.items()}


def _without_effect(given: dict[str, Any], cls: type[TrainerConfig]) -> list[Problem]:
    """EasyDeL's fields that do nothing here are taken out, and the shared ones that this trainer does not use; said is
    only where a value asks for something else.
    """
    unused = {name: ((_default(cls, None, name),), told) for name, told in inherit(cls, "UNUSED").items()}
    elsewhere = {name: field for name, field in SEED_FIELDS.items() if name not in cls.model_fields}
    notes = []
    for name, (same, instead) in {**elsewhere, **unused}.items():
        if name in given and given.pop(name) not in same:
            notes.append(Problem(name, f"has no effect here: {instead}", fatal=False))
    return notes


def _saved_by(given: dict[str, Any], cls: type[TrainerConfig]) -> list[Problem]:
    """Take out the class that EasyDeL writes into a file it saves; another trainer's is warned of."""
    name = given.pop(SAVED_BY, cls.__name__)
    if name == cls.__name__:
        return []
    return [Problem(SAVED_BY, f"the file is of a {name}, and is read as a {cls.__name__} here", fatal=False)]


def _aliases(given: dict[str, Any], cls: type[TrainerConfig]) -> list[Problem]:
    """Other spellings into names. Both spellings may be given where they say the same, or one says nothing."""
    problems = []
    aliases = cls._aliases()
    for alias in [alias for alias in aliases if alias in given]:
        value, name = given.pop(alias), aliases[alias]
        if not _may_be_none(cls, name):  # EasyDeL's none: the default
            if given.get(name, 0) is None:
                del given[name]
            if value is None:
                continue
        if name in given and given[name] != value:
            problems.append(Problem(alias, f"another name of {name}, which is given too; remove one"))
        given.setdefault(name, value)
    return problems


def _may_be_none(cls: type[TrainerConfig], name: str) -> bool:
    return name not in cls.model_fields or type(None) in get_args(cls.model_fields[name].annotation)


def _single_components(given: dict[str, Any], cls: type[TrainerConfig]) -> None:
    """A name or a table where a list of components is wanted is a list of one: `logger = "wandb"`."""
    for name, value in given.items():
        annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
        if get_origin(annotation) is list and isinstance(value, str | Mapping | Component):
            (item,) = get_args(annotation)
            owner = get_args(item)[0] if get_origin(item) is Annotated else item
            if isinstance(owner, type) and issubclass(owner, Component):
                given[name] = [value]


def _flat_names(given: dict[str, Any], cls: type[TrainerConfig], base: TrainerConfig | None) -> list[Problem]:
    """Flat names into the tables they stand for, which start from the default where they are not given."""
    flat = [(name, target[0], target[1]) for name, target in cls._flat().items() if name in given]
    # Names first: the options of a default that is not chosen do not apply to what is.
    flat.sort(key=lambda item: item[2] != "name")
    said = {field: _table(given[field]) for _, field, _ in flat if field in given}
    tables: dict[str, dict[str, Any]] = {}
    problems = []
    for name, field, key in flat:
        value, default = given.pop(name), _default(cls, base, field)
        if field not in tables:
            start = said[field] if field in said else _table(default) or {}
            if start is None:
                continue  # neither a table nor a name, as validation says
            other = key == "name" and field not in said and value != start.get("name")
            tables[field] = {} if other else dict(start)
        if key in (said.get(field) or {}):
            problems.append(Problem(name, f"the same as {field}.{key}, which is given too; remove one"))
        elif value is None and isinstance(default, Component):
            tables[field].pop(key, None)  # an option that is none is one that is not given
        else:
            tables[field][key] = value
    given |= tables
    return problems


def _wandb(given: dict[str, Any], default: Any) -> list[Problem]:
    """`use_wandb` into the list of loggers; `wandb_entity` and `wandb_name` into the options of wandb there."""
    use = given.pop("use_wandb", False)
    named = {"wandb_entity": "entity", "wandb_name": "run_name"}
    options = {key: value for key in named if (value := given.pop(key, None)) is not None}
    loggers = given.get("logger", default)
    if not isinstance(use, bool):
        return [Problem("use_wandb", f"expected true or false, got {format_value(use)}")]
    if not (use or options) or not isinstance(loggers, list | tuple):
        return []
    tables: list[Any] = [_table(logger) or logger for logger in loggers]
    there = [each for each in tables if isinstance(each, dict) and each.get("name") == "wandb"]
    if use and there and "logger" in given:
        return [Problem("use_wandb", "logger names wandb too; remove one")]
    if use and not there:
        there = [{"name": "wandb"}]
        tables += there
    if not there:
        return [Problem(key, "has no effect without use_wandb = true", fatal=False) for key in options]
    twice = [key for key in options if named[key] in there[0] and "logger" in given]
    there[0].update({named[key]: value for key, value in options.items()})
    given["logger"] = tables
    return [Problem(key, f"the same as {named[key]} of logger wandb; remove one") for key in twice]


def _split(given: dict[str, Any], default: Any) -> list[Problem]:
    """`dataset_split` into the table of `train_data`."""
    if "dataset_split" not in given:
        return []
    split, data = given.pop("dataset_split"), given.get("train_data", default)
    if split is None:
        return []
    if isinstance(data, Path | str):
        data = {"name": str(data)}
    if not isinstance(data, Mapping):
        return [Problem("dataset_split", "needs train_data, one dataset by name or in a table")]
    if "split" in data:
        return [Problem("dataset_split", "the same as train_data.split, which is given too; remove one")]
    given["train_data"] = {**data, "split": split}
    return []


def _optimizer(given: dict[str, Any], default: Any) -> list[Problem]:
    """`extra_optimizer_kwargs` into the options of `optimizer`."""
    extra = given.pop("extra_optimizer_kwargs", None)
    if not extra:
        return []
    if not isinstance(extra, Mapping):
        return [Problem("extra_optimizer_kwargs", f"expected a table, got {format_value(extra)}")]
    table = _table(given.get("optimizer", default))
    if table is None:
        return []  # neither a table nor a name, as validation says
    twice = [key for key in extra if "optimizer" in given and key in table]
    given["optimizer"] = {**table, **extra}
    return [
        Problem(
            f"extra_optimizer_kwargs.{key}", f"the same as optimizer.{key}, which is given too; remove one"
        )
        for key in twice
    ]


def _default(cls: type[TrainerConfig], base: TrainerConfig | None, field: str) -> Any:
    if base is not None:
        return getattr(base, field)
    default = cls.model_fields[field].get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def _table(value: Any) -> dict[str, Any] | None:
    """A nested value as a table of what was said, or None where it is neither a table nor a name."""
    if isinstance(value, Options):
        return value._table(only_set=True)
    if isinstance(value, str):
        return {"name": value}
    return dict(value) if isinstance(value, Mapping) else None
