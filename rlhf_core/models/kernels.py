"""The kernels of accelerators: components that an installed distribution registers, and no part of core."""

from __future__ import annotations

from typing import Any, TypeVar

from rlhf_core.contracts import Kind
from rlhf_core.errors import warn
from rlhf_core.plugins import installed_registry
from rlhf_core.plugins.registry import DISTRIBUTED, Registry
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.machine import platform

T = TypeVar("T")
NAME = "pallas"
"""Under which a distribution of kernels registers them."""


def find_kernels(kind: Kind[T], registry: Registry | None = None) -> T | None:
    """Find the component that computes a kind in kernels, for a program that is traced now: None on CPUs, and where no
    kernels are installed, which a warning says once in a run.

    registry: where to look; None: among what is installed.
    """
    if platform() == "cpu":
        return None
    registry = installed_registry() if registry is None else registry
    if NAME in registry.names(kind):
        return registry.get(kind, NAME)
    _warn_without(kind)
    return None


@cached
def _warn_without(kind: Kind[Any]) -> None:
    warn(f"{kind.name}: computed without kernels, which come with pip install {DISTRIBUTED[kind, NAME]}")
