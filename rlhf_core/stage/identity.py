"""Identify what a stage computes: its resolved config, hashes of its inputs, and hashes of the source of its code."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core import artifacts, runtime
from rlhf_core.config.build import components
from rlhf_core.config.paths import is_input_field, is_written, only_measures, split_file_name
from rlhf_core.config.secrets import public_table
from rlhf_core.config.trainer import function_name
from rlhf_core.contracts import DATASET, LOGGER, TRAINER, Kind, Trainer
from rlhf_core.data.records import is_stream, named_sets
from rlhf_core.data.source import digest, json_text
from rlhf_core.errors import UNREADABLE, InputError, RunError, exists, read_limited
from rlhf_core.hub import Pins
from rlhf_core.mesh import fetch_array
from rlhf_core.models import Model
from rlhf_core.plugins.component import load_function
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.files import disk_reason, seal, unseal, write_atomic
from rlhf_core.stage.decide import flat, is_compared
from rlhf_core.tokenizer import template_hash, tokenizer_hash

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.plugins.registry import Registry

LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "tokenizers", "transformers")
"""Libraries whose versions are recorded besides those of the suite and its plugins."""

PLAIN = (str, bytes, int, float, complex, type(None))
SMALL = 2**20
"""Files below this size are hashed every time: caching their hashes would take as long."""
SETTLED_SECONDS = 2.0
"""A file written more recently may change again without a new time stamp, so its hash is not cached."""
MOST_CACHED = 4096
MOST_FILES = 10_000
"""Files of a directory that is hashed. Whoever gives a home directory by mistake should not wait for all of it."""


def of_pipeline(
    trainer: str,
    seed: int,
    written: TrainerConfig,
    inputs: Mapping[str, tuple[Path, str | None]],
    registry: Registry,
    pins: Mapping[str, str],
) -> dict[str, Any]:
    """Record a stage of a pipeline.

    inputs: {field: (path, STAGE.OUTPUT or None)}; a path that does not exist yet has no identity. pins: of the hub.
    """
    paths = {field: _path_input(path, reference) for field, (path, reference) in inputs.items()}
    return _record(trainer, seed, written, public_table(written, registry), paths, registry) | _hub(pins)


def of_objects(
    trainer: str,
    seed: int,
    config: TrainerConfig,
    given: Mapping[str, Any],
    registry: Registry,
    pins: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Record a trainer called from Python. given: its arguments, as in `Stage.inputs`. pins: of the hub."""
    table = public_table(config, registry)
    inputs: dict[str, dict[str, Any]] = {}
    functions: dict[str, dict[str, Any]] = {}
    sets = named_sets(given.get("eval_dataset"))
    given = {**given, **{f"eval_dataset.{name}": each for name, each in sets.items()}}
    for name, value in given.items():
        field = name.replace("_dataset", "_data", 1)
        if value is None or name == "compute_metrics" or (name == "eval_dataset" and sets):
            continue
        if name == "optimizers":
            transformation, schedule = value
            if transformation is not None:
                functions |= _own_code("optimizer", transformation.update)
            if schedule is not None:
                functions |= _own_code("scheduler", schedule)
        elif name == "rewards":
            first = len(table.get("rewards") or ())
            for index, reward in enumerate(value, first):
                if isinstance(reward, str):
                    table.setdefault("rewards", []).append(reward)
                else:
                    table.setdefault("rewards", []).append(_name(reward))
                    functions[f"rewards[{index}]"] = _code(_name(reward), "", of_callable(reward))
        elif name == "tokenizer" and not isinstance(value, str):
            inputs[field] = _object(value, of_tokenizer(value))
        elif isinstance(value, Model):
            inputs[field] = _object(value, of_model(value))
            if value.tokenizer is not None:
                inputs[f"{field}.tokenizer"] = _object(value.tokenizer, of_tokenizer(value.tokenizer))
        elif (spec := _spec(value)) is not None:
            table[field] = spec
        else:
            inputs[field] = _object(value, of_rows(value))
    for field, path in _paths(table):
        inputs.setdefault(field, _path_input(path, None))
    record = _record(trainer, seed, config, table, inputs, registry)
    return {**record, "code": {**record["code"], **functions}} | _hub(pins)


def _hub(pins: Mapping[str, str] | None) -> dict[str, Any]:
    return {"hub": dict(pins)} if pins else {}


def pinned_inputs(given: Mapping[str, Any], pins: Pins, problems: list[str]) -> dict[str, Any]:
    """Replace hf:// names in what a trainer is given from Python, as `Pins.pin` does; objects stay."""
    specs = {name: _spec(value) for name, value in given.items()}
    pinned = {name: pins.pin(spec, name, problems) for name, spec in specs.items()}
    return {name: value if pinned[name] == specs[name] else pinned[name] for name, value in given.items()}


def _record(
    trainer: str,
    seed: int,
    config: TrainerConfig,
    table: Mapping[str, Any],
    inputs: Mapping[str, Any],
    registry: Registry,
) -> dict[str, Any]:
    record = {
        "trainer": trainer,
        "seed": seed,
        "config": table,
        "inputs": inputs,
        "code": dict(_components(trainer, config, registry)),
        "versions": versions(),
    }
    return json.loads(json.dumps(record))  # as it will be read back


def versions() -> dict[str, str]:
    """Return {distribution: version} of the suite, its plugins and the numerical libraries."""
    by_name = artifacts.versions()
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            by_name[name] = version(name)
    return by_name


def _path_input(path: Path, reference: str | None) -> dict[str, Any]:
    return {
        "path": str(path),
        "reference": reference,
        "identity": identify(path) if exists(path) else None,
    }


def _object(value: Any, content: str) -> dict[str, Any]:
    return {"path": None, "reference": f"the {type(value).__name__} given from Python", "identity": content}


def _code(name: str, owner: str, content: str) -> dict[str, str]:
    return {"name": name, "owner": owner, "hash": content}


def _own_code(field: str, function: Any) -> dict[str, dict[str, str]]:
    """Identify a function given from Python by its source: {field: code}. Those of libraries have their versions."""
    owner = _top_module(function)
    return {} if owner in LIBRARIES else {field: _code(_name(function), owner, of_callable(function))}


def _name(thing: Any) -> str:
    return str(getattr(thing, "__name__", type(thing).__name__))


def _spec(value: Any) -> Any:
    """Return data or a model passed from Python as a config field would hold it; None for an object."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping):
        plain = all(
            isinstance(each, str | int | float | bool | None | list | dict) for each in value.values()
        )
        return dict(value) if plain else None
    if isinstance(value, list | tuple) and value:
        names = [_spec(each) for each in value]
        is_spec = all(isinstance(each, str) or (each and {"name", "path"} & set(each)) for each in names)
        return names if is_spec else None
    return None


def _paths(table: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield (dotted field, path) of every file and directory that a configuration names."""
    for field, value in flat(table).items():
        if not isinstance(value, str) or not is_compared(field):
            continue
        parts = split_file_name(value)
        last = re.sub(r"\[\d+\]", "", field.rpartition(".")[2])
        path = Path(parts[0] if parts else value).expanduser()
        if is_written(field) or only_measures(field):
            continue
        if (parts or path.is_absolute() or is_input_field(last)) and exists(path):
            yield field, path


def _components(
    trainer: str, config: TrainerConfig, registry: Registry
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (field, code) of the trainer, of every component that the configuration names, and of a schedule."""
    if not isinstance(config.scheduler, str):
        yield "scheduler", _code(function_name(config.scheduler), "", of_callable(config.scheduler))
    elif ":" in config.scheduler and not split_file_name(config.scheduler):  # a file is an input
        with suppress(InputError):  # which is reported when it is used
            yield "scheduler", _code(config.scheduler, "", of_callable(load_function(config.scheduler)))
    named: list[tuple[str, Kind[Any], str]] = [("trainer", TRAINER, trainer)]
    for field, kind, _, component in components(type(config), dict(config)):
        if kind != LOGGER and not (
            kind.by_path and split_file_name(component["name"])
        ):  # that file is an input
            named.append((field, kind, component["name"]))
    for field in ("train_data", "eval_data"):
        names = {v for k, v in flat(getattr(config, field)).items() if k == "" or k.endswith(("name", "]"))}
        named += [(field, DATASET, name) for name in sorted(map(str, names & set(registry.names(DATASET))))]
    for field, kind, name in named:
        with suppress(InputError):  # an unknown name is reported when it is used
            thing, owner = registry.source(kind, name)
            content = of_component(thing)
            if content is not None:
                yield field, _code(name, owner, content)


def identify(path: Path) -> str:
    """Hash a path: every byte of a file, or every file of a directory except hidden ones.

    For an artifact only the manifest is read, which has the hash of each file; see `artifacts.identity`.
    """
    if path.is_file():
        return hash_files([path])[0]
    if (path / artifacts.MANIFEST).is_file():
        return artifacts.identity(path)
    files = sorted(itertools.islice(_visible_files(path), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise InputError(
            f"{path} is a directory of more than {MOST_FILES:,} files: give a data file, a directory that `datasets` "
            "saved, or the directory of a model"
        )
    hashes = hash_files(files)
    names = (file.relative_to(path).as_posix() for file in files)
    return digest(*(f"{name}\0{content}" for name, content in zip(names, hashes, strict=True)))


def _visible_files(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = (Path(folder, name) for name in files if not name.startswith("."))
        yield from (file for file in visible if os.path.isfile(file))  # False where it may not be looked at


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file's bytes.

    Hashes of large files are kept on disk by path, size, inode, and the times of modification and of change. A program
    may set the first of these times, as `rsync --times` does; the second is the kernel's.
    """
    file = runtime.cache_root() / "hashes.json"
    try:
        known = dict(unseal(read_limited(file))["files"])
    except UNREADABLE:  # missing or damaged: hashes are computed again
        known = {}
    added: dict[str, str] = {}

    def hash_of(path: Path) -> str:
        stat = path.stat()
        key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        if key in known:
            return str(known[key])
        content = artifacts.hash_file(path)
        settled = time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_SECONDS
        if stat.st_size >= SMALL and settled:
            added[key] = content
        return content

    with ThreadPoolExecutor(8) as pool:
        try:
            hashes = list(pool.map(hash_of, paths))
        except OSError as error:
            raise InputError(f"{error.filename} cannot be read: {disk_reason(error)}") from error
    if added:
        with suppress(OSError, RunError):  # the cache only saves time
            write_atomic(file, seal({"files": dict(list({**known, **added}.items())[-MOST_CACHED:])}))
    return hashes


def of_rows(data: Any) -> str:
    """Hash the rows of data in memory: a list of mappings, a `datasets.Dataset`, a data frame, or any sequence.

    A list may also mix these with file names and tables that name a file; then the contents of the files count. Of a
    stream given as a function or an iterable, the source of its code counts.
    """
    if is_stream(data) and not isinstance(data, list | tuple | Mapping):
        return digest("stream", of_callable(data))
    if isinstance(data, list | tuple) and not all(isinstance(item, Mapping) for item in data):
        return digest("several", *map(_of_item, data))
    content = hashlib.sha256()
    for row in _rows(data):
        content.update(json_text(row).encode() + b"\n")
    return content.hexdigest()


def _of_item(item: Any) -> str:
    if not isinstance(item, str | Path | Mapping):
        return of_rows(item)
    table = item if isinstance(item, Mapping) else {"path": str(item)}
    path = Path(str(table.get("path", ""))).expanduser()
    content = identify(path) if table.get("path") and exists(path) else ""
    return digest(json_text({key: table[key] for key in table if not content or key != "path"}), content)


def _rows(data: Any) -> Iterable[Any]:
    if hasattr(data, "fingerprint") and hasattr(data, "sources"):  # our own Records
        return [data.fingerprint]
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # a data frame
        names = [str(name) for name in data.columns]
        return (dict(zip(names, values, strict=True)) for values in data.itertuples(index=False, name=None))
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # the format changes types, not rows
        data = data.with_format(None)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return (data[i] for i in range(len(data)))
    return [repr(data)]


def of_model(model: Model) -> str:
    """Hash a model in memory: its parameters, its configuration and its adapters."""
    content = hashlib.sha256(
        json.dumps([model.hf_config, str(model.definition.lora)], sort_keys=True, default=str).encode()
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        content.update(f"{jax.tree_util.keystr(path)}\0{leaf.dtype}\0{leaf.shape}\0".encode())
        content.update(np.ascontiguousarray(np.atleast_1d(fetch_array(leaf))).view(np.uint8).data)
    return content.hexdigest()


def of_tokenizer(tokenizer: Any) -> str:
    """Hash a tokenizer in memory, with its chat template."""
    return digest(tokenizer_hash(tokenizer), str(template_hash(tokenizer)))


@cached
def _package_hash(top: str) -> str | None:
    """Hash the code of a top-level module: all files of a package, or the one file."""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    if module is None or not file or top == "__main__":
        return None
    home = Path(file)
    files = sorted(home.parent.rglob("*.py")) if hasattr(module, "__path__") else [home]
    try:
        return digest(*(f"{path.relative_to(home.parent).as_posix()}\0{path.read_text()}" for path in files))
    except (OSError, ValueError):
        return None


def of_component(thing: Any) -> str | None:
    """Hash the Python files of the package or file that a component comes from.

    None for rlhf-core, which is identified by its version, and where there are no files.
    """
    top = _top_module(thing)
    return None if top == "rlhf_core" else _package_hash(top)


def _top_module(thing: Any) -> str:
    """Return the name of the package or file that a component's code is in."""
    return str(getattr(_code_of(thing), "__module__", "")).partition(".")[0]


def of_callable(thing: Any) -> str:
    """Hash the source of a function or of an object's class, and the plain values that the object was made with.

    Without source, as in a console, its qualified name counts. What it calls and refers to does not count.
    """
    code = _code_of(thing)
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        source = f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"
    values: dict[str, Any] = {}
    if isinstance(thing, functools.partial):
        values = {**{str(i): value for i, value in enumerate(thing.args)}, **thing.keywords}
    elif not inspect.isroutine(thing) and not inspect.isclass(thing):
        made_with = inspect.signature(type(thing)).parameters
        values = {name: vars(thing)[name] for name in made_with if name in getattr(thing, "__dict__", {})}
    plain = {name: value for name, value in values.items() if isinstance(value, PLAIN)}
    return digest(source, json.dumps(plain, default=repr, sort_keys=True))


def _code_of(thing: Any) -> Any:
    """Return the function or class of a component: inside a Trainer, a partial, a jitted function or a method."""
    if isinstance(thing, Trainer):
        return _code_of(thing.build or thing.run)
    if inspect.isfunction(thing) or inspect.isclass(thing):
        return thing
    for name in ("func", "__wrapped__", "__func__"):
        if callable(inside := getattr(thing, name, None)):
            return _code_of(inside)
    return thing if inspect.isroutine(thing) else type(thing)
