"""Keep passwords and keys out of everything that a run writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.config.build import components
from rlhf_core.errors import InputError
from rlhf_core.hidden import HIDDEN, hide, hide_named, remember

if TYPE_CHECKING:
    from rlhf_core.config.options import Options
    from rlhf_core.contracts import Kind


class Secrets(Protocol):
    """The part of a registry that `public_table` needs."""

    def secret_options(self, kind: Kind[Any], name: str, /) -> frozenset[str]:
        """Return the options of a component that hold a SecretStr."""
        ...


def reads_environment(value: Any) -> bool:
    """Check whether a value is `{ env = "NAME" }`, or a table or list that contains one."""
    if isinstance(value, Mapping):
        return _variable(value) is not None or any(reads_environment(item) for item in value.values())
    return isinstance(value, list | tuple) and any(reads_environment(item) for item in value)


def is_hidden(value: Any) -> bool:
    """Check whether a value is the text that `public_table` writes for a secret, or contains it."""
    if isinstance(value, Mapping):
        return any(map(is_hidden, value.values()))
    return (
        value == HIDDEN
        if isinstance(value, str)
        else isinstance(value, list | tuple) and any(map(is_hidden, value))
    )


def from_environment(value: Any) -> Any:
    """Replace every `{ env = "NAME" }` by the text of that environment variable, and remember it for `scrub`.

    Raises InputError for a variable that is not set.
    """
    if isinstance(value, Mapping):
        name = _variable(value)
        if name is None:
            return {key: from_environment(item) for key, item in value.items()}
        if name not in os.environ:
            raise InputError(f"the environment variable {name} is not set; export {name}=…")
        return remember(os.environ[name])
    if isinstance(value, list | tuple):
        return [from_environment(item) for item in value]
    return value


def remember_all(value: Any) -> None:
    """Remember every text in the value of a secret option, whether or not it fits the option."""
    if isinstance(value, str):
        remember(value)
    elif isinstance(value, Mapping) and _variable(value) is None:
        remember_all(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            remember_all(item)


def public_table(config: Options, registry: Secrets) -> dict[str, Any]:
    """Convert a configuration to a table that may be written to disk: `to_dict` with secrets hidden.

    Hides options of type SecretStr and texts under names such as `api_key`; leaves `{ env = "NAME" }` unchanged.
    """
    table = config.to_dict()
    for _, kind, _, component in components(type(config), table):
        for option in registry.secret_options(kind, component["name"]) & set(component):
            if isinstance(component[option], str):
                component[option] = hide(component[option])
    return {name: hide_named(name, value) for name, value in table.items()}


def _variable(value: Mapping[Any, Any]) -> str | None:
    name = value.get("env")
    return name if set(value) == {"env"} and isinstance(name, str) and name else None
