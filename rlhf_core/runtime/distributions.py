"""The installed distributions that extend the suite, as their entry points name them.

The group `rlhf` has modules with hooks, `rlhf.KIND` the components of a kind, such as `rlhf.policy_loss`, and
`rlhf.kind` kinds that a distribution declares; `rlhf.commands` has commands, `rlhf.urls` functions for models behind
a URL, and `rlhf.registry` rlhf-core's own function that opens the registry.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import NamedTuple

from rlhf_core.runtime.caches import cached

HOOKS = "rlhf"
COMMANDS = "rlhf.commands"
URLS = "rlhf.urls"
REGISTRY = "rlhf.registry"


class Installed(NamedTuple):
    """A distribution's name and version."""

    name: str
    version: str


def find_points(group: str) -> list[EntryPoint]:
    """Find the entry points of a group."""
    return [point for point in _points(tuple(sys.path)) if point.group == group]


def plugin_points() -> Iterator[EntryPoint]:
    """Yield the entry points that a plugin consists of: those of hooks, components and kinds."""
    for point in _points(tuple(sys.path)):
        if point.group not in (COMMANDS, URLS, REGISTRY):
            yield point


@cached
def _points(path: tuple[str, ...]) -> list[EntryPoint]:
    """Find all entry points of ours, once a run: a look opens files of every installed distribution."""
    found = entry_points()
    groups = sorted(group for group in found.groups if f"{group}.".startswith(f"{HOOKS}."))
    return [point for group in groups for point in found.select(group=group)]


def find_distribution(point: EntryPoint) -> Installed | None:
    """Find the distribution that an entry point belongs to; None without one, or where it has lost its metadata."""
    return None if point.dist is None else _metadata(point.dist)


def owner(point: EntryPoint) -> str:
    """Name the distribution of an entry point for messages."""
    found = find_distribution(point)
    return f"{found.name} {found.version}" if found else point.value


def versions() -> dict[str, str]:
    """Collect {distribution: version} of all that are plugins."""
    found = map(find_distribution, plugin_points())
    return dict(sorted({distribution for distribution in found if distribution is not None}))


@functools.lru_cache(maxsize=64)
def _metadata(dist: Distribution) -> Installed | None:
    """Read a distribution's name and version, once: each read parses the whole of METADATA."""
    try:  # without METADATA they are None, or an error in later Pythons
        installed = Installed(dist.name, dist.version)
    except Exception:
        return None
    return installed if installed.name and installed.version else None
