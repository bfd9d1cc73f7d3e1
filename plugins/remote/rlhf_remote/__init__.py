"""Rewards that ask a service over HTTP.

Names are resolved on first use: `rlhf --help` imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_remote.rewards import Http as Http
    from rlhf_remote.rewards import Judge as Judge

__all__ = ["Http", "Judge"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rlhf_remote' has no attribute '{name}'")
    return getattr(import_module("rlhf_remote.rewards"), name)
