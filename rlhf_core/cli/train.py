"""`rlhf train`: turn flags into a pipeline of one stage, and run it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rlhf_core import plugins, runtime
from rlhf_core.config import TrainerConfig, fields, parse_value
from rlhf_core.config.build import field_values
from rlhf_core.config.toml import to_value
from rlhf_core.config.trainer import directory_name
from rlhf_core.config.translation import Names
from rlhf_core.contracts import TRAINER
from rlhf_core.errors import InputError
from rlhf_core.pipeline import run
from rlhf_core.pipeline.file import PipelineFile, assemble
from rlhf_core.pipeline.plan import plan, with_all_metrics
from rlhf_core.runtime.caches import own_run
from rlhf_core.runtime.terminal import echo, show

FLAG = "true or false"
_NUMBER = re.compile(r"-\.?\d")


def train(trainer: str, arguments: Sequence[str]) -> None:
    """Run one stage from flags, or print the available flags.

    Raises InputError for an argument that is not a flag, a flag without a value, and every problem of the plan.
    """
    flags = list(_flags(arguments))
    given: dict[str, list[str]] = {"plugin": [], "reuse": [], "accept": []}
    for key, value in flags:
        if key not in given:
            continue
        if value is None:
            raise InputError(f"--{key}: needs a value")
        given[key].append(value)
    wants_help = any(key in ("help", "h") for key, _ in flags)
    is_verbose = any(key == "verbose" and value in (None, "true") for key, value in flags)
    with own_run() if wants_help else runtime.session():
        host = plugins.load(files=[Path(value) for value in given["plugin"]])
        config = host.registry.get(TRAINER, trainer).config
        if wants_help:
            _print_fields(trainer, config)
            return
        own = [flag for flag in flags if flag[0] not in given]
        file = pipeline_from_flags(trainer, config, own, host.registry)
        reuse = given["reuse"][-1] if given["reuse"] else None
        planned = plan(file, host)
        if is_verbose:
            planned = with_all_metrics(planned)
        run(planned, host, accept=given["accept"], reuse=reuse)


def pipeline_from_flags(
    trainer: str,
    config: type[TrainerConfig],
    flags: Sequence[tuple[str, str | None]],
    registry: Names | None = None,
) -> PipelineFile:
    """Build a pipeline from (field, value) pairs; a bare flag has the value None.

    The stage is named after the trainer, and paths are relative to the current directory. `dir` defaults to
    `save_directory`, else to runs/TRAINER, and the run's name below it, if it has one. A field that holds a list may
    be given several times. registry: translates names of other libraries; None: what is installed does.
    """
    kinds = {field.name: field.type for field in fields(config)} | {"dir": "text"}
    aliases = config.aliases()
    table: dict[str, Any] = {"mesh": {}}
    stage: dict[str, Any] = {"name": trainer, "trainer": trainer}
    seen: set[str] = set()
    problems = []
    for key, text in flags:
        if text is None and kinds.get(key, FLAG) != FLAG:
            problems.append(f"--{key}: needs a value")
            continue
        value = True if text is None else parse_value(text)
        if key in seen and "list" not in kinds.get(aliases.get(key, key), "list"):
            problems.append(f"--{key}: given twice; remove one")
        elif key == "dir":
            table["dir"] = text
        elif key.startswith("mesh."):
            table["mesh"][key.removeprefix("mesh.")] = value
        else:
            problems += _put(stage, key, value, again=key in seen, many=kinds.get(key, "").startswith("list"))
        seen.add(key)
    if problems:
        raise InputError(*problems)
    if "dir" not in table:
        options = {key: value for key, value in stage.items() if key not in ("name", "trainer")}
        table["dir"] = str(_directory(trainer, field_values(config, options, registry)))
    return assemble({**table, "stage": [stage]}, base=Path.cwd())


def _directory(trainer: str, values: Mapping[str, Any]) -> Path:
    """Return the directory of a run without `--dir`: below `save_directory`, else runs/TRAINER, by the run's name."""
    names = [values.get("trainer_prefix"), values.get("run_name")]
    name = directory_name(*(str(each) if each else None for each in names))
    return Path(values.get("save_directory") or f"runs/{trainer}", name)


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (field, value) of `--field value`, `--field=value`, `--some-field`, or a bare `--flag`, value None."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("-") or _NUMBER.match(word):
            raise InputError(f"{word}: not a flag; write --FIELD {word}")
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if equals:
            yield name, value
        elif position < len(arguments) and _is_value(arguments[position]):
            yield name, arguments[position]
            position += 1
        else:
            yield name, None


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word == "-" or _NUMBER.match(word) is not None


def _put(stage: dict[str, Any], key: str, value: Any, *, again: bool, many: bool) -> list[str]:
    """Set a dotted field; return the problems."""
    *tables, last = key.split(".")
    inner = stage
    for name in tables:
        table = inner.setdefault(name, {})
        if isinstance(table, str):
            table = inner[name] = {"name": table}
        if not isinstance(table, dict):
            return [f"--{key}: --{name} already has a value that is not a table"]
        inner = table
    if not again:
        if isinstance(inner.get(last), Mapping) and isinstance(value, str):
            inner[last]["name"] = value  # --loss.epsilon 0.1 came before --loss dapo
        else:
            inner[last] = [value] if many and not isinstance(value, list) else value
    elif isinstance(inner[last], list):
        inner[last] += value if isinstance(value, list) else [value]
    else:
        inner[last] = [inner[last], value]
    return []


def _print_fields(trainer: str, config: type[TrainerConfig]) -> None:
    table = Table(title=f"rlhf train {trainer}", title_justify="left", box=None, pad_edge=False)
    table.add_column("flag", no_wrap=True)
    table.add_column("value; default")
    for field in fields(config):
        default = "" if field.default is None else f"; {to_value(field.default)}"
        about = f"\n{field.description}" if field.description else ""
        table.add_row(f"--{field.name}", f"{field.type}{field.bounds}{default}{about}")
    echo(f"rlhf train {trainer} --model DIR --train_data FILE [--FIELD VALUE]... --dir RUN\n")
    show(table)


__all__ = ["pipeline_from_flags", "train"]
