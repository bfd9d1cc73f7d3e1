"""What a pipeline needs of this suite that is not installed: read from its file, whatever is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from rlhf_core import ATTENTION, LOGGER, MODEL, REWARD, TRAINER, Kind, Registry
from rlhf_core.plugins.registry import DISTRIBUTED

FIELDS: Mapping[str, Kind[Any]] = {
    "trainer": TRAINER,
    "rewards": REWARD,
    "logger": LOGGER,
    "attention": ATTENTION,
}
"""The fields of a stage that name components, alone, in a list, or as tables with a `name`."""


def missing(tables: list[Mapping[str, Any]], directory: Path, registry: Registry) -> dict[str, list[str]]:
    """Return {what to give to pip: the components that it has} of the stages of a pipeline.

    directory: that paths of models start from.
    """
    found: dict[str, list[str]] = {}
    for table in tables:
        for kind, name in components(table, directory):
            package = DISTRIBUTED.get((kind, name))
            if package is None or (is_known(kind, name, registry) and is_installed(package)):
                continue
            about = f"{kind.name} {name}"
            if about not in found.setdefault(package, []):
                found[package].append(about)
    return found


def components(table: Mapping[str, Any], directory: Path) -> Iterator[tuple[Kind[Any], str]]:
    """Yield the components that a stage names."""
    for field, kind in FIELDS.items():
        value = table.get(field)
        for each in value if isinstance(value, list) else [value]:
            name = each.get("name") if isinstance(each, Mapping) else each
            if isinstance(name, str):
                yield kind, name
    if table.get("use_wandb"):
        yield LOGGER, "wandb"
    for field in ("model", "reward_model", "teacher"):
        model = table.get(field)
        described: Any = model
        if isinstance(model, str):
            try:
                described = json.loads((directory / model / "config.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):  # of another stage, of the hub, or for `rlhf check` to name
                continue
        if isinstance(described, Mapping) and isinstance(described.get("model_type"), str):
            yield MODEL, described["model_type"].removesuffix("_text")


def is_known(kind: Kind[Any], name: str, registry: Registry) -> bool:
    """Tell whether a component is registered; of models, whether any family reads them."""
    if kind != MODEL:
        return name in registry.names(kind)
    types = {each for family in registry.names(MODEL) for each in registry.get(MODEL, family).name}
    return bool({name, f"{name}_text"} & types)


def is_installed(package: str) -> bool:
    """Tell whether a distribution is here, and what the extras in its name require."""
    wanted = Requirement(package)
    try:
        requires = distribution(wanted.name).requires or ()
    except PackageNotFoundError:
        return False
    for text in requires:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or not any(marker.evaluate({"extra": extra}) for extra in wanted.extras):
            continue
        try:
            distribution(requirement.name)
        except PackageNotFoundError:
            return False
    return True
