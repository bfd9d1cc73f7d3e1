"""Environments of the package verifiers, by name.

verifiers imports this package for `Chat`, rlhf for its entry point; names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_verifiers.chat import Chat as Chat
    from rlhf_verifiers.environment import Tasks as Tasks
    from rlhf_verifiers.environment import Verifiers as Verifiers

_HOMES = {"Chat": "chat", "Tasks": "environment", "Verifiers": "environment"}
__all__ = ["Chat", "Tasks", "Verifiers"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_verifiers' has no attribute '{name}'")
    return getattr(import_module(f"rlhf_verifiers.{_HOMES[name]}"), name)
