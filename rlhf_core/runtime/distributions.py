"""Find the installed distributions that extend the suite."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from typing import NamedTuple

from rlhf_core.runtime.caches import cached

GROUP = "rlhf"


class Installed(NamedTuple):
    """A distribution's name and version."""

    name: str
    version: str


def find_points(group: str) -> EntryPoints:
    """Find the entry points of a group, once a run: a look opens files of every installed distribution."""
    return _points(group, tuple(sys.path))


@cached
def _points(group: str, path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=group)


def find_distribution(point: EntryPoint) -> Installed | None:
    """Find the distribution that an entry point belongs to; None without one, or where it has lost its metadata."""
    return None if point.dist is None else _metadata(point.dist)


def owner(point: EntryPoint) -> str:
    """Name the distribution of an entry point for messages."""
    found = find_distribution(point)
    return f"{found.name} {found.version}" if found else point.value


def versions() -> dict[str, str]:
    """Collect {distribution: version} of all that have an entry point `rlhf`."""
    found = map(find_distribution, find_points(GROUP))
    return dict(sorted(distribution for distribution in found if distribution is not None))


@functools.lru_cache(maxsize=64)
def _metadata(dist: Distribution) -> Installed | None:
    """Read a distribution's name and version, once: each read parses the whole of METADATA."""
    try:  # without METADATA they are None, or an error in later Pythons
        installed = Installed(dist.name, dist.version)
    except Exception:
        return None
    return installed if installed.name and installed.version else None
