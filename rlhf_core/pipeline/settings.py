"""The settings of a stage that decide what it learns, as a plan prints them: those of the file, and the defaults."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Component, TrainerConfig
from rlhf_core.config.build import components
from rlhf_core.config.secrets import public_table
from rlhf_core.contracts import ATTENTION, SAMPLER, Kind

if TYPE_CHECKING:
    from rlhf_core.plugins.registry import Registry

UNLEARNED = (ATTENTION, SAMPLER)
"""Kinds of components that decide how something is computed, not what is learned."""


def settings_lines(config: TrainerConfig, registry: Registry) -> list[str]:
    """Return a line with the settings that the user gave, components among them, and one with those left at defaults.

    A stage that only evaluates has no line of defaults.
    """
    learned = _learned(config, registry)
    given = {name: _component_names(getattr(config, name)) for name in config.model_fields_set}
    given |= {name: text for name, text in learned.items() if name in config.model_fields_set}
    left = {name: text for name, text in learned.items() if name not in config.model_fields_set}
    lines = ["; ".join(f"{name} {text}" for name, text in sorted(given.items()) if text)]
    if config.max_training_steps != 0:
        lines.append(f"by default: {'; '.join(f'{name} {text}' for name, text in left.items())}")
    return [line for line in lines if line]


def _learned(config: TrainerConfig, registry: Registry) -> dict[str, str]:
    """Return {field: its value in words} of the components that decide what is learned, and of `LEARNING_FIELDS`."""
    found = {}
    table = public_table(config, registry)
    fields = type(config).model_fields
    for path, kind, _, component in components(type(config), table):
        if path in fields and kind not in UNLEARNED:
            # An option that is a field too, such as weight_decay, has the field's value unless it is given.
            defaults = _defaults(kind, component["name"], registry)
            options = {option: value for option, value in defaults.items() if option not in fields}
            options |= {option: value for option, value in component.items() if option != "name"}
            found[path] = _with_options(Path(component["name"]).name, options)
    unused = "max_training_steps" if config.max_training_steps is None else "num_train_epochs"
    for name in type(config).LEARNING_FIELDS:
        if name != unused:
            found[name] = _in_words(table[name])
    return found


def _defaults(kind: Kind[Any], name: str, registry: Registry) -> dict[str, Any]:
    """Return {option: default} of a component, without defaults that are no number or text, such as a factory's."""
    options = registry.options(kind, name)
    parameters = inspect.signature(registry.source(kind, name)[0]).parameters if options else {}
    defaults = {option: parameters[option].default for option in parameters if option in options}
    return {option: value for option, value in defaults.items() if isinstance(value, int | float | str)}


def _in_words(value: Any) -> str:
    """Write the value of a field; a table with a name as a component."""
    if not isinstance(value, Mapping):
        return _plain(value)
    options = {name: each for name, each in value.items() if name != "name"}
    return _with_options(str(value.get("name", "")), options)


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    """Write a name and its options, `k3 (beta 0.04)`, without those that are none."""
    shown = [f"{option} {_plain(value)}" for option, value in options.items() if value is not None]
    return f"{name} ({', '.join(shown)})" if shown else name


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _component_names(value: Any) -> str:
    """Name the components of a field, by the labels that metrics have where there are any; empty for other fields."""
    values = value if isinstance(value, list | tuple) else [value]
    components = [each for each in values if isinstance(each, Component)]
    return ", ".join(getattr(each, "label", None) or Path(each.name).name for each in components)
