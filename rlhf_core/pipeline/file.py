"""Read a pipeline file: its TOML with `--set` and `--dir` applied, and the paths in it made absolute."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core import hub
from rlhf_core.config import TrainerConfig, parse_value
from rlhf_core.config.paths import is_input_field, is_written, names_remote_model, split_file_name
from rlhf_core.config.toml import MOST_PARTS, parse_toml
from rlhf_core.data.records import named_sets
from rlhf_core.errors import InputError, exists, read_limited, reading, suggest, suggest_file
from rlhf_core.mesh import SAME_AXES, axis_sizes, named_axes

TOP_LEVEL = ("dir", "seed", "mesh", "stage")
STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
DATA_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt", ".gz", ".zst"}
MOST_FILE = 2**26
"""Bytes of a pipeline file."""
_STEP = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class PipelineFile:
    """A pipeline as written, with `--set` and `--dir` applied.

    path: the file, or None for a pipeline made from flags. dir: absolute. mesh: {axis of `rlhf_core.mesh.AXES`: size}.
    stages: the [[stage]] tables, with absolute paths; each has a `name`, and a `trainer`, empty where it is missing.
    problems: errors found so far.
    """

    path: Path | None
    dir: Path
    seed: int
    mesh: Mapping[str, int]
    stages: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...] = field(default=())


def read(path: str | Path, *, sets: Sequence[str] = (), dir: str | Path | None = None) -> PipelineFile:
    """Read a pipeline file.

    sets: `stage.field=value` or `seed=1`, applied in order. dir: replaces the file's `dir`. Paths in the file are
    relative to the file; `dir`, and paths in `sets`, to the current directory. Raises InputError if the file does not
    exist or is not TOML; other problems are collected, to be reported together with those of the plan.
    """
    path = Path(path)
    return assemble(_parse(path), base=path.resolve().parent, path=path, sets=sets, dir=dir)


def assemble(
    table: Mapping[str, Any],
    *,
    base: Path,
    path: Path | None = None,
    sets: Sequence[str] = (),
    dir: str | Path | None = None,
) -> PipelineFile:
    """Build a pipeline from its TOML table; relative paths in it are relative to `base`."""
    problems: list[str] = []
    tables = _stage_tables(table, problems)
    top = {key: value for key, value in table.items() if key != "stage"}
    if isinstance(top.get("mesh"), Mapping):
        top["mesh"] = named_axes(top["mesh"], problems)
    for text in sets:
        _apply(text, top, tables, problems)
    for key in top:
        if key not in TOP_LEVEL:
            problems.append(f"{key}: unknown field of a pipeline.{suggest(key, TOP_LEVEL)}")
    stages: list[dict[str, Any]] = []
    for index, options in enumerate(tables):
        made = _stage_table(index, options, base, problems)
        if any(stage["name"] == made["name"] for stage in stages):
            problems.append(f"stage '{made['name']}': two stages have this name; rename one")
        stages.append(made)
    if not stages:
        problems.append("stage: the pipeline has none; add a [[stage]] table with name and trainer")
    return PipelineFile(
        path=path,
        dir=_directory(top.get("dir") if dir is None else dir, problems),
        seed=_seed(top.get("seed", 0), problems),
        mesh=axis_sizes(top["mesh"], problems) if "mesh" in top else {},
        stages=tuple(stages),
        problems=tuple(problems),
    )


def _stage_table(index: int, options: dict[str, Any], base: Path, problems: list[str]) -> dict[str, Any]:
    """Read one [[stage]] table: its name, its trainer, and its fields with absolute paths."""
    name, trainer = options.pop("name", None), options.pop("trainer", None)
    if name is None:
        problems.append(f'stage {index + 1}: name: missing; add, for example, name = "policy"')
        name = f"{index + 1}"
    elif not isinstance(name, str) or not STAGE_NAME.fullmatch(name) or name in TOP_LEVEL:
        problems.append(
            f"stage {index + 1}: name: {name!r} cannot name a stage; use letters, digits, - and _"
        )
        name = str(name)
    where = f"stage '{name}'"
    if not isinstance(trainer, str):
        problems.append(f'{where}.trainer: missing; add, for example, trainer = "sft"')
        trainer = ""
    fields = {
        key: resolve_paths(key, value, base, f"{where}.{key}", problems) for key, value in options.items()
    }
    for key in fields.keys() - set(TrainerConfig.names()):
        # A field of the trainer's own, or another library's name of a field.
        fields[key] = _function_path(fields[key], base)
    model = fields.get("model")
    if isinstance(model, str) and re.fullmatch(r"[^/.]+", model):  # no OWNER/NAME, no STAGE.OUTPUT
        fields["model"] = _existing(model, base, f"{where}.model", problems)
    return {"name": name, "trainer": trainer, **fields}


def resolve_paths(field: str, value: Any, base: Path, where: str, problems: list[str]) -> Any:
    """Make the paths in `value` absolute; a path that must exist and does not is a problem.

    A value that neither exists nor looks like a path is unchanged: a hub name, a `datasets` name, or a stage's output.
    """
    if isinstance(value, Mapping):
        # A set of eval_data is a file, or a table, as eval_data itself.
        has_sets = field == "eval_data" and bool(named_sets(value))
        resolved = {}
        for key, item in value.items():
            if not names_remote_model(key, value):
                below = field if has_sets else key
                item = resolve_paths(below, item, base, f"{where}.{key}", problems)
            resolved[key] = item
        return resolved
    if isinstance(value, list | tuple):
        return [resolve_paths(field, v, base, f"{where}[{i}]", problems) for i, v in enumerate(value)]
    if not isinstance(value, str) or hub.is_hub_name(value):
        return value
    return _resolved_text(TrainerConfig.aliases().get(field, field), value, base, where, problems)


def _resolved_text(field: str, value: str, base: Path, where: str, problems: list[str]) -> str:
    """Make a field's text absolute where it is a path; see `resolve_paths`."""
    if not value:
        if is_input_field(field):
            problems.append(f"{where}: is empty; give a path or a name, or leave it out")
        return value
    if is_written(where):
        return _absolute(value, base)
    if field in ("name", "rewards", "environment", "tools", "scheduler", "metrics"):
        return _function_path(value, base)
    if field == "chat_template":
        return value if value == "plain" else _existing(value, base, where, problems, also=["plain"])
    if is_input_field(field):
        if os.path.lexists(base / Path(value).expanduser()):
            return _absolute(value, base)
        if _looks_like_a_path(value, base):
            return _existing(value, base, where, problems)
    return value


def _function_path(value: Any, base: Path) -> Any:
    """Make the file of `file.py:function` absolute; the registry reports a missing one."""
    parts = split_file_name(value) if isinstance(value, str) else None
    return value if parts is None else f"{_absolute(parts[0], base)}:{parts[1]}"


def _parse(path: Path) -> dict[str, Any]:
    if not exists(path):
        raise InputError(f"{path}: no such file.{suggest_file(path)}")
    if path.is_dir():
        raise InputError(f"{path} is a directory; give the pipeline file in it")
    with reading(path):
        content = read_limited(path, MOST_FILE)
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        try:
            return parse_toml(text)
        except tomllib.TOMLDecodeError as error:
            message, _, at = str(error).partition(" (at ")
            line = f" {at.rstrip(')')}" if at else ""
            if message.startswith("Cannot declare (") and message.endswith(") twice"):
                name = ".".join(re.findall(r"'([^']*)'", message))
                fix = "; write [[stage]], with two brackets" if name == "stage" else ""
                message = f"the table [{name}] is there twice{fix}"
            raise InputError(f"{path}{line}: not valid TOML: {message}") from None


def _stage_tables(table: Mapping[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    stages = table.get("stage", [])
    if isinstance(stages, list) and all(isinstance(stage, Mapping) for stage in stages):
        return [dict(stage) for stage in stages]
    problems.append("stage: write each stage as a [[stage]] table, with two brackets")
    return []


def _apply(text: str, top: dict[str, Any], stages: list[dict[str, Any]], problems: list[str]) -> None:
    """Apply one `--set`; the paths in its value are relative to the current directory."""
    key, equals, raw = text.partition("=")
    steps = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
    if not equals or not all(map(_STEP.fullmatch, steps)):
        problems.append(f"--set {text}: write stage.field=value, or seed=1")
        return
    if len(steps) > MOST_PARTS:
        problems.append(
            f"--set {text[:60]}…: the key has {len(steps):,} parts; at most {MOST_PARTS} are read"
        )
        return
    by_name = {str(stage.get("name")): stage for stage in stages}
    value: Any = parse_value(raw.strip())
    head = steps[0]
    try:
        if head in by_name and len(steps) > 1:
            # Problems with the path are reported once, when the whole stage's paths are resolved.
            field = next(step for step in reversed(steps) if not step.isdecimal())
            _assign(by_name[head], steps[1:], resolve_paths(field, value, Path.cwd(), "", []))
        elif head in TOP_LEVEL and head != "stage":
            _assign(top, [SAME_AXES.get(step, step) if head == "mesh" else step for step in steps], value)
        else:
            problems.append(f"--set {text}: {_no_such_key(head, by_name)}")
    except LookupError as error:
        problems.append(f"--set {text}: {error.args[0]}")


def _no_such_key(head: str, stages: Collection[str]) -> str:
    """Say that the key of a `--set` begins with nothing that can be set."""
    if head in stages:
        return f"'{head}' is a stage: write {head}.field=value"
    known = [*stages, "seed", "mesh", "dir"]
    return f"no stage '{head}'.{suggest(head, known)} Stages: {', '.join(stages) or 'none'}"


def _assign(target: Any, steps: Sequence[str], value: Any, at: str = "") -> None:
    """Set `value` at `steps`, copying the tables on the way; "dapo" becomes {name = "dapo"} where a field of it is set.

    A list entry is written rewards[1] or rewards.1. at: the steps so far. Raises LookupError, with a message, if there
    is nothing to set.
    """
    name, *rest = steps
    step: str | int = name
    here = f"{at}.{name}".lstrip(".")
    if isinstance(target, list):
        known = f"it has {len(target)}, numbered from 0"
        if not name.isdecimal():
            raise LookupError(f"'{at}' is a list: write {at}[0].{name}; {known}")
        if int(name) >= len(target):
            raise LookupError(f"'{at}' has no entry {name}: {known}")
        step = int(name)
        here = f"{at}[{name}]"
    elif name.isdecimal():
        raise LookupError(f"'{at}' is a table, which has no entry {name}; write {at}.field")
    if rest:
        inner = target[step] if isinstance(step, int) else target.get(step, {})
        if isinstance(inner, str) and not rest[0].isdecimal():
            inner = {"name": inner}
        if rest[0].isdecimal() and inner == {}:
            raise LookupError(f"'{here}' has no entry {rest[0]}: it is not given in the file")
        if not isinstance(inner, Mapping | list):
            raise LookupError(f"'{here}' is {inner!r}, which has no '{rest[0]}'")
        inner = list(inner) if isinstance(inner, list) else dict(inner)
        _assign(inner, rest, value, here)
        value = inner
    target[step] = value


def _directory(value: Any, problems: list[str]) -> Path:
    if isinstance(value, str | Path) and str(value):
        return Path(_absolute(str(value), Path.cwd()))
    problems.append('dir: missing; add dir = "runs/first" to the file, or give --dir')
    return Path.cwd() / "runs"


def _seed(value: Any, problems: list[str]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32:
        return value
    problems.append(f"seed: a whole number from 0 to 2^32 - 1; got {value!r}")
    return 0


def _absolute(value: str, base: Path) -> str:
    return os.path.normpath(base / Path(value).expanduser())


def _looks_like_a_path(value: str, base: Path) -> bool:
    """Return whether a value looks like a path rather than a hub name, `name` or `owner/name`."""
    if value.startswith(("/", "./", "../", "~")) or value in (".", ".."):
        return True
    if value.endswith("/") or value.count("/") > 1 or Path(value).suffix in DATA_SUFFIXES:
        return True
    return "/" in value and (base / value).parent.is_dir()


def _existing(value: str, base: Path, where: str, problems: list[str], *, also: Sequence[str] = ()) -> str:
    """Return an absolute path; a missing file is a problem. also: words allowed in place of a path."""
    path = Path(_absolute(value, base))
    if not exists(path):
        problems.append(f"{where}: no such file: {path}.{suggest(value, also) or suggest_file(path)}")
    return str(path)
