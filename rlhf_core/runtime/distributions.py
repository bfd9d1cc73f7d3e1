"""Find the installed distributions that extend the suite, and the remains of half-uninstalled ones."""

from __future__ import annotations

import functools
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import NamedTuple

GROUP = "rlhf"


class Installed(NamedTuple):
    """A distribution's name and version."""

    name: str
    version: str


def find_distribution(point: EntryPoint) -> Installed | None:
    """Find the distribution that an entry point belongs to; None without one, or if it is half uninstalled."""
    if point.dist is None or leftover_path(point) is not None:
        return None
    return _metadata(point.dist)


def leftover_path(point: EntryPoint) -> str | None:
    """Return the path of a half-uninstalled distribution: without METADATA, or renamed by pip for deletion."""
    dist = point.dist
    if dist is None:
        return None
    path = str(getattr(dist, "_path", None) or dist.locate_file(""))
    renamed = path.replace("\\", "/").rpartition("/")[2].startswith("~")
    return path if renamed or _metadata(dist) is None else None


def versions() -> dict[str, str]:
    """Collect {distribution: version} of all that have an entry point `rlhf`, except half-uninstalled ones."""
    distributions = (find_distribution(point) for point in entry_points(group=GROUP))
    return dict(sorted(distribution for distribution in distributions if distribution is not None))


@functools.lru_cache(maxsize=64)
def _metadata(dist: Distribution) -> Installed | None:
    """Read a distribution's name and version; None without them.

    Each read parses the whole of METADATA, so it happens once per distribution that `entry_points` finds.
    """
    try:  # without METADATA they are None, or an error in later Pythons
        installed = Installed(dist.name, dist.version)
    except Exception:
        return None
    return installed if installed.name and installed.version else None
