"""Keep passwords and keys out of everything that a run writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, quote_plus

from rlhf_core.config.build import components
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.config.options import Options
    from rlhf_core.contracts import Kind

HIDDEN = "**********"
"""The text that replaces a secret in written configurations."""
SECRET_NAME = re.compile(
    r"(.*_)?(api_?key|secret(_key)?|passw(or)?d|passphrase|credentials?|private_key|access_key|"
    r"(access|auth|api|hf|bearer|refresh)_token)|token|authorization",
    re.IGNORECASE,
)
"""Names of options whose text counts as a secret, whatever their type."""
SECRET_VARIABLE = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|API_?KEY|(SECRET|PRIVATE|ACCESS)_KEY)", re.IGNORECASE
)
"""Names of environment variables whose text is hidden in messages, such as HF_TOKEN."""
MIN_SCRUBBED = 6
"""Minimum length of a secret to hide in messages; hiding shorter ones would hide ordinary words."""
_known: set[str] = set()


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


def remember(secret: str) -> str:
    """Remember a secret for `scrub` to hide, and return it."""
    if len(secret) >= MIN_SCRUBBED:
        _known.add(secret)
    return secret


def remember_all(value: Any) -> None:
    """Remember every text in the value of a secret option, whether or not it fits the option."""
    if isinstance(value, str):
        remember(value)
    elif isinstance(value, Mapping) and _variable(value) is None:
        remember_all(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            remember_all(item)


def scrub(text: str) -> str:
    """Hide secrets in a message, such as one that quotes a request: remembered ones, and those of the environment."""
    variables = {value for name, value in os.environ.items() if SECRET_VARIABLE.fullmatch(name)}
    secrets = _known | {value for value in variables if len(value) >= MIN_SCRUBBED}
    for form in sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def _forms(secret: str) -> set[str]:
    """Return a secret as it is, and as messages quote it: as Python, as JSON and in addresses."""
    quoted = quote(secret, safe="", errors="replace")
    return {
        secret,
        repr(secret)[1:-1],
        json.dumps(secret)[1:-1],
        quoted,
        quote_plus(secret, errors="replace"),
    }


def public_table(config: Options, registry: Secrets) -> dict[str, Any]:
    """Convert a configuration to a table that may be written to disk: `to_dict` with secrets hidden.

    Hides options of type SecretStr and texts under names such as `api_key`; leaves `{ env = "NAME" }` as it is.
    """
    table = config.to_dict()
    for _, kind, _, component in components(type(config), table):
        for option in registry.secret_options(kind, component["name"]) & set(component):
            if isinstance(component[option], str):
                component[option] = _hide(component[option])
    return {name: _hide_named(name, value) for name, value in table.items()}


def _hide_named(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _hide_named(str(key), item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_hide_named(name, item) for item in value]
    return _hide(value) if isinstance(value, str) and SECRET_NAME.fullmatch(name) else value


def _hide(secret: str) -> str:
    remember(secret)
    return HIDDEN


def _variable(value: Mapping[Any, Any]) -> str | None:
    name = value.get("env")
    return name if set(value) == {"env"} and isinstance(name, str) and name else None
