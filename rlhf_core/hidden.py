"""Hide passwords and keys in texts that the suite prints or writes."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "**********"
"""The text that replaces a secret."""
SECRET_NAME = re.compile(
    r"(.*_)?(api_?key|secret(_key)?|passw(or)?d|passphrase|credentials?|private_key|access_key|"
    r"(access|auth|api|hf|bearer|refresh)_token)|token|authorization",
    re.IGNORECASE,
)
"""Names of options whose text counts as a secret."""
SECRET_VARIABLE = re.compile(
    r"(.*_)?(TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|API_?KEY|(SECRET|PRIVATE|ACCESS)_KEY)", re.IGNORECASE
)
"""Names of environment variables whose text is hidden in messages, such as HF_TOKEN."""
MIN_SCRUBBED = 6
"""Minimum length of a secret to hide in messages; hiding shorter ones would hide ordinary words."""
_known: set[str] = set()
_written = warnings.formatwarning


def remember(secret: str) -> str:
    """Remember a secret for `scrub` to hide, and return it."""
    if len(secret) >= MIN_SCRUBBED:
        _known.add(secret)
    return secret


def known() -> frozenset[str]:
    """Return the secrets that are remembered, for another process to hide."""
    return frozenset(_known)


def scrub(text: str) -> str:
    """Hide secrets in a text, such as a message that quotes a request: remembered ones, and the environment's."""
    return str(scrub_all(text))


def scrub_all(value: Any) -> Any:
    """Hide secrets in every text of a value that JSON can hold."""
    variables = {os.environ[name] for name in os.environ if _names_secret(name)}
    return _replaced(value, _forms_of(frozenset(_known | variables)))


def _replaced(value: Any, forms: Sequence[str]) -> Any:
    if isinstance(value, str):
        for form in forms:
            value = value.replace(form, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {key: _replaced(item, forms) for key, item in value.items()}
    return [_replaced(item, forms) for item in value] if isinstance(value, list | tuple) else value


def hide_named(name: str, value: Any) -> Any:
    """Hide texts under names such as `api_key`, at any depth of a value, and remember them."""
    if isinstance(value, Mapping):
        return {key: hide_named(str(key), item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [hide_named(name, item) for item in value]
    return hide(value) if isinstance(value, str) and SECRET_NAME.fullmatch(name) else value


def remember_attributes(thing: Any) -> None:
    """Remember the secrets that an object holds: a SecretStr, and texts under names such as `api_key`."""
    for name, value in getattr(thing, "__dict__", {}).items():
        if hasattr(value, "get_secret_value"):
            remember(str(value.get_secret_value()))
        elif isinstance(value, str | Mapping):
            hide_named(name, value)


def hide(secret: str) -> str:
    """Remember a secret, and return what is shown in its place."""
    remember(secret)
    return HIDDEN


def hide_in_output(secrets: Iterable[str] = ()) -> None:
    """Hide secrets in what Python itself prints: warnings, and what ends a thread. secrets: to remember first."""
    for secret in secrets:
        remember(secret)
    warnings.formatwarning = _format_warning
    threading.excepthook = _show_thread_end


def _format_warning(*about: Any, **named: Any) -> str:
    return scrub(_written(*about, **named))


def _show_thread_end(ended: Any) -> None:
    if ended.exc_type is not SystemExit:
        lines = traceback.format_exception(ended.exc_type, ended.exc_value, ended.exc_traceback)
        print(scrub("".join(lines)), end="", file=sys.stderr, flush=True)


@functools.cache
def _names_secret(variable: str) -> bool:
    return SECRET_VARIABLE.fullmatch(variable) is not None


@functools.lru_cache(maxsize=8)
def _forms_of(secrets: frozenset[str]) -> list[str]:
    forms = {form for secret in secrets if len(secret) >= MIN_SCRUBBED for form in _forms(secret)}
    return sorted((form for form in forms if len(form) >= MIN_SCRUBBED), key=len, reverse=True)


def _forms(secret: str) -> set[str]:
    """Return a secret as it is, line by line, and as messages quote it: as Python, as JSON and in addresses."""
    return {
        secret,
        *map(str.strip, secret.splitlines()),
        " ".join(secret.split()),
        repr(secret)[1:-1],
        repr(secret.encode(errors="surrogateescape"))[2:-1],
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        quote(secret, safe="", errors="replace"),
        quote(secret, errors="replace"),
        quote_plus(secret, errors="replace"),
    }
