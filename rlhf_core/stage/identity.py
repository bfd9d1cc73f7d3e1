"""The identity of what a stage computes: its configuration, and hashes of its inputs and of the source of its code."""

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
from dataclasses import replace
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
from rlhf_core.data.table import digest, json_text
from rlhf_core.errors import UNREADABLE, InputError, RunError, exists, read_limited
from rlhf_core.mesh import fetch_array
from rlhf_core.models import Model
from rlhf_core.plugins.component import load_function
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.files import disk_reason, seal, unseal, write_atomic
from rlhf_core.stage.spec import StageSpec, flat, is_compared
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


def identified(spec: StageSpec, registry: Registry) -> StageSpec:
    """Fill in what a stage computes: its configuration and code, and the contents of its inputs that exist by now."""
    table = public_table(spec.written, registry)
    inputs = {field: _path_input(path, reference) for field, (reference, path) in spec.references.items()}
    code = dict(_components(spec.trainer_name, spec.written, registry))
    for name, value in _objects(spec.objects):
        field = name.replace("_dataset", "_data", 1)
        plain = as_field(value)
        if name == "optimizers":
            code |= _code_of_optimizers(value)
        elif name == "rewards":
            rewards = table.setdefault("rewards", [])
            for reward in value:
                if not isinstance(reward, str):
                    code[f"rewards[{len(rewards)}]"] = _code(_name(reward), "", of_callable(reward))
                rewards.append(reward if isinstance(reward, str) else _name(reward))
        elif name == "tokenizer" and plain is None:
            inputs[field] = _object(value, of_tokenizer(value))
        elif isinstance(value, Model):
            inputs[field] = _object(value, of_model(value))
            if value.tokenizer is not None:
                inputs[f"{field}.tokenizer"] = _object(value.tokenizer, of_tokenizer(value.tokenizer))
        elif plain is not None:
            table[field] = plain
        else:
            inputs[field] = _object(value, of_rows(value))
    for field, path in _files(table, relative=spec.alone):
        inputs.setdefault(field, _path_input(path, None))
    record: dict[str, Any] = {
        "trainer": spec.trainer_name,
        "seed": spec.seed,
        "config": table,
        "inputs": inputs,
        "code": code,
        "versions": versions(),
    }
    if spec.pins:
        record["hub"] = dict(spec.pins)
    return replace(spec, record=json.loads(json.dumps(record)))  # as it will be read back


def _objects(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the arguments of a Python trainer that decide what it computes; named sets one by one."""
    sets = named_sets(given.get("eval_dataset"))
    for name, value in given.items():
        if name == "eval_dataset" and sets:
            yield from ((f"{name}.{each}", rows) for each, rows in sets.items())
        elif value is not None and name != "compute_metrics":
            yield name, value


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


def _code_of_optimizers(given: tuple[Any, Any]) -> dict[str, dict[str, str]]:
    """Identify (transformation or None, schedule or None): {field: code}. Those of libraries have their versions."""
    transformation, schedule = given
    functions = {"optimizer": getattr(transformation, "update", None), "scheduler": schedule}
    return {
        field: _code(_name(function), _top_module(function), of_callable(function))
        for field, function in functions.items()
        if function is not None and _top_module(function) not in LIBRARIES
    }


def _name(thing: Any) -> str:
    return str(getattr(thing, "__name__", type(thing).__name__))


def as_field(value: Any) -> Any:
    """Return data or a model passed from Python as a config field would hold it; None for an object."""
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping):
        plain = all(
            isinstance(each, str | int | float | bool | None | list | dict) for each in value.values()
        )
        return dict(value) if plain else None
    if isinstance(value, list | tuple) and value:
        names = [as_field(each) for each in value]
        is_field = all(isinstance(each, str) or (each and {"name", "path"} & set(each)) for each in names)
        return names if is_field else None
    return None


def _files(table: Mapping[str, Any], *, relative: bool) -> Iterator[tuple[str, Path]]:
    """Yield (dotted field, path) of every file and directory that a configuration names.

    relative: whether the paths may be relative to the current directory; those of a pipeline are absolute.
    """
    leaves = flat(table)
    for field, value in leaves.items():
        if not isinstance(value, str) or not is_compared(field) or is_written(field) or only_measures(field):
            continue
        table_name = field.removesuffix("model")
        if table_name != field and {f"{table_name}url", f"{table_name}urls", f"{table_name}urls[0]"} & {
            *leaves
        }:
            continue  # a model at another address
        parts = split_file_name(value)
        last = re.sub(r"\[\d+\]", "", field.rpartition(".")[2])
        path = Path(parts[0] if parts else value).expanduser()
        if (path.is_absolute() or (relative and (parts or is_input_field(last)))) and exists(path):
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
        inside = getattr(thing, name, None)
        if callable(inside):
            return _code_of(inside)
    return thing if inspect.isroutine(thing) else type(thing)
