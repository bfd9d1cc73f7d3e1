"""Record what a stage computes, from a pipeline's stage or from the arguments of a trainer called from Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import artifacts
from rlhf_core.config.build import components
from rlhf_core.config.paths import is_input_field
from rlhf_core.config.secrets import public_table
from rlhf_core.contracts import DATASET, LOGGER, TRAINER, Kind
from rlhf_core.errors import InputError, exists
from rlhf_core.models import Model
from rlhf_core.stage import code_identity, identity
from rlhf_core.stage.differences import flat, is_compared

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.plugins.registry import Registry

LIBRARIES = ("jax", "jaxlib", "numpy", "optax", "tokenizers", "transformers")
"""Libraries whose versions are recorded besides those of the suite and its plugins."""


def of_pipeline(
    trainer: str,
    seed: int,
    written: TrainerConfig,
    inputs: Mapping[str, tuple[Path, str | None]],
    registry: Registry,
) -> dict[str, Any]:
    """Record a stage of a pipeline.

    inputs: {field: (path, STAGE.OUTPUT or None)}; a path that does not exist yet has no identity.
    """
    paths = {field: _path_input(path, reference) for field, (path, reference) in inputs.items()}
    return _record(trainer, seed, written, public_table(written, registry), paths, registry)


def of_objects(
    trainer: str, seed: int, config: TrainerConfig, given: Mapping[str, Any], registry: Registry
) -> dict[str, Any]:
    """Record a trainer called from Python. given: its arguments, as in `Stage.inputs`."""
    table = public_table(config, registry)
    inputs: dict[str, dict[str, Any]] = {}
    functions: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        field = name.replace("_dataset", "_data")
        if value is None:
            continue
        if name == "rewards":
            first = len(table.get("rewards") or ())
            for index, reward in enumerate(value, first):
                if isinstance(reward, str):
                    table.setdefault("rewards", []).append(reward)
                else:
                    table.setdefault("rewards", []).append(_name(reward))
                    functions[f"rewards[{index}]"] = _code(
                        _name(reward), "", code_identity.of_callable(reward)
                    )
        elif name == "tokenizer" and not isinstance(value, str):
            inputs[field] = _object(value, identity.of_tokenizer(value))
        elif isinstance(value, Model):
            inputs[field] = _object(value, identity.of_model(value))
            if value.tokenizer is not None:
                inputs[f"{field}.tokenizer"] = _object(
                    value.tokenizer, identity.of_tokenizer(value.tokenizer)
                )
        elif (spec := _spec(value)) is not None:
            table[field] = spec
        else:
            inputs[field] = _object(value, identity.of_rows(value))
    for field, path in _paths(table):
        inputs.setdefault(field, _path_input(path, None))
    record = _record(trainer, seed, config, table, inputs, registry)
    return {**record, "code": {**record["code"], **functions}}


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
        "identity": identity.identify(path) if exists(path) else None,
    }


def _object(value: Any, content: str) -> dict[str, Any]:
    return {"path": None, "reference": f"the {type(value).__name__} given from Python", "identity": content}


def _code(name: str, owner: str, content: str) -> dict[str, str]:
    return {"name": name, "owner": owner, "hash": content}


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
        file, colon, _ = value.partition(":")
        last = re.sub(r"\[\d+\]", "", field.rpartition(".")[2])
        path = Path(file if colon and file.endswith(".py") else value).expanduser()
        is_file = colon and file.endswith(".py")
        if (is_file or path.is_absolute() or is_input_field(last)) and exists(path):
            yield field, path


def _components(
    trainer: str, config: TrainerConfig, registry: Registry
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (field, code) of the trainer and of every component that the configuration names."""
    named: list[tuple[str, Kind[Any], str]] = [("trainer", TRAINER, trainer)]
    for field, kind, _, component in components(type(config), dict(config)):
        if kind != LOGGER and not (kind.by_path and ".py:" in component["name"]):  # that file is an input
            named.append((field, kind, component["name"]))
    for field in ("train_data", "eval_data"):
        names = {v for k, v in flat(getattr(config, field)).items() if k == "" or k.endswith(("name", "]"))}
        named += [(field, DATASET, name) for name in sorted(map(str, names & set(registry.names(DATASET))))]
    for field, kind, name in named:
        with suppress(InputError):  # an unknown name is reported when it is used
            thing, owner = registry.source(kind, name)
            content = code_identity.of_component(thing)
            if content is not None:
                yield field, _code(name, owner, content)
