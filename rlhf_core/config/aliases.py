"""Expand what a user may write into canonical fields, by the table of other names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from rlhf_core.config.options import Component, Options, Problem, format_value
from rlhf_core.config.other_names import TRAINER_NAMES, Ignored, Taken, as_given
from rlhf_core.config.paths import table_in

PART_NAMES = (
    "use_wandb",
    "wandb_entity",
    "wandb_name",
    "extra_optimizer_kwargs",
    "force_step_start_point",
    "per_epoch_training_steps",
    "performance_mode",
    "report_metrics",
    "verbose",
)
"""Names that stand for part of a list, for several entries of a table, or for a value of several fields."""
NEVER = 10**9
"""Updates between two rows of a run that logs its last update alone."""


def expand(
    data: Mapping[str, Any], cls: type[Options], base: Options | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Expand `data` into canonical fields, with problems and warnings. base: the config it will be merged into."""
    table = dict(data)
    problems = _remove_saved_class(table, cls)
    problems += _convert(table, cls)
    problems += _replace_aliases(table, cls)
    problems += _replace_parts(table, cls, base)
    _wrap_single_components(table, cls)
    _spell_none(table, cls)
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


def _convert(fields: dict[str, Any], cls: type[Options]) -> list[Problem]:
    """Convert the values of other names that are not taken as they are; remove those that ask for nothing."""
    problems = []
    for name, meaning in cls.other_names().items():
        if name not in fields or not isinstance(meaning, Taken) or name in cls.model_fields:
            continue
        try:
            value = meaning.convert(fields[name])
        except (TypeError, ValueError) as error:
            problems.append(Problem(name, str(error)))
            value = None
        none_is_ours = meaning.convert is as_given and "." not in meaning.path
        if (fields.pop(name) is None and none_is_ours and _may_be_none(cls, meaning.path)) or (
            value is not None
        ):
            fields[name] = value
    return problems


def _replace_aliases(fields: dict[str, Any], cls: type[Options]) -> list[Problem]:
    """Replace other spellings by names. Both may be given if they agree, or if one of them is none."""
    problems = []
    meanings = cls.other_names()
    for alias, name in cls.aliases().items():
        if alias not in fields or "." in name:
            continue
        value, meaning = fields.pop(alias), meanings[alias]
        if isinstance(meaning, Taken) and name in fields:
            if value in meaning.same:
                continue
            if meaning.smaller and isinstance(fields[name], int) and not isinstance(fields[name], bool):
                fields[name] = value = min(value, fields[name])
            if fields[name] is None or meaning.wins:
                del fields[name]
        if not _may_be_none(cls, name):  # EasyDeL's none: the default
            if fields.get(name, 0) is None:
                del fields[name]
            if value is None:
                continue
        if name in fields and fields[name] != value:
            problems.append(Problem(alias, f"another name for {name}, which is also given; remove one"))
        fields.setdefault(name, value)
    return problems


def _replace_parts(fields: dict[str, Any], cls: type[Options], base: Options | None) -> list[Problem]:
    """Replace names that do not correspond to a single field."""
    problems = []
    flags = ("force_step_start_point", "performance_mode", "report_metrics", "verbose")
    given = {name: value for name in flags if (value := fields.pop(name, None)) is not None}
    for name, value in list(given.items()):
        if not isinstance(value, bool):
            problems.append(Problem(name, f"expected true or false, got {format_value(value)}"))
            del given[name]
    if given.get("force_step_start_point"):
        fields["resume_if_possible"] = False
    if given.get("performance_mode"):
        fields |= {"log_steps": NEVER, "report_steps": None, "log_grad_norms": False}
    if given.get("report_metrics") is False:
        fields |= {"logger": [], "use_wandb": False}
    if given.get("verbose") is False:
        fields["progress_bar_type"] = "none"
    if (steps := fields.pop("per_epoch_training_steps", None)) is not None:
        epochs = fields.get("num_train_epochs", _default(cls, base, "num_train_epochs"))
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            problems.append(
                Problem(
                    "per_epoch_training_steps", f"expected a number of at least 1, got {format_value(steps)}"
                )
            )
        elif isinstance(epochs, int | float):
            total, limit = max(1, round(steps * epochs)), fields.get("max_training_steps")
            fields["max_training_steps"] = min(total, limit) if isinstance(limit, int) else total
    return problems + _without_previews(fields, cls, base)


def _without_previews(fields: dict[str, Any], cls: type[Options], base: Options | None) -> list[Problem]:
    """Turn previews off where they have no interval, or nothing to complete, as EasyDeL does."""
    names = {name for name, path in cls.aliases().items() if path.startswith("previews.")}
    every, given = (fields.get(name) for name in ("generation_interval", "previews"))
    if "generation_interval" in names and every == 0 and not isinstance(every, bool):
        for name in names:
            fields.pop(name, None)
        fields["previews"] = None
        twice = "0 is no previews, but previews is also given; remove one"
        return [] if given is None else [Problem("generation_interval", twice)]
    if fields.get("generation_use_train_prompts") is not False:
        return []
    table = _table(given if "previews" in fields else _default(cls, base, "previews"))
    if table is not None:
        if given is not None and "from_data" in table:
            del fields["generation_use_train_prompts"]
        return []
    if fields.get("generation_prompts"):
        del fields["generation_use_train_prompts"]
        return []
    for name in names:
        fields.pop(name, None)
    nothing = "has no effect: generation_use_train_prompts is false, and there are no generation_prompts"
    return [] if every is None else [Problem("generation_interval", nothing, fatal=False)]


def _spell_none(fields: dict[str, Any], cls: type[Options]) -> None:
    """Read none as the word where that is a value of the field: `--remat none`."""
    for name, value in fields.items():
        if value is None and name in cls.model_fields:
            annotation = cls.model_fields[name].annotation
            if get_origin(annotation) is Literal and "none" in get_args(annotation):
                fields[name] = "none"


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
    asked = {name: fields[name] for name, _, _ in found}
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
            problems.append(Problem(name, f"the same as {field}.{key}, which is also given; remove one"))
        else:
            tables[field][key] = value
    for field in [field for field in tables if field not in given and _default(cls, base, field) is None]:
        # A file of theirs has all names of a table that nobody asked for.
        asked_by = getattr(table_in(cls.model_fields[field].annotation), "ASKED_BY", ())
        if asked_by and not set(asked_by) & set(tables[field]):
            del tables[field]
            problems += [
                Problem(name, f"has no effect without {field}.{asked_by[0]}", fatal=False)
                for name, value in asked.items()
                if cls.aliases()[name].partition(".")[0] == field and value not in _same(cls, name)
            ]
    fields |= {name: table for name, table in tables.items() if table or name in given}
    return problems


def _same(cls: type[Options], name: str) -> tuple[Any, ...]:
    """Return the values of a name that ask for nothing."""
    meaning = cls.other_names()[name]
    return meaning.same if isinstance(meaning, Taken) else ()


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
        return [Problem("use_wandb", "logger also names wandb; remove one")]
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
            f"extra_optimizer_kwargs.{key}", f"the same as optimizer.{key}, which is also given; remove one"
        )
        for key in twice
    ]


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
