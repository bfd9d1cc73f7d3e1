"""The installed distributions that extend the suite, and what is left of those that were only half uninstalled."""

from __future__ import annotations

from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import NamedTuple

GROUP = "rlhf"


class Installed(NamedTuple):
    """A distribution's name and version."""

    name: str
    version: str


def find_distribution(point: EntryPoint) -> Installed | None:
    """The distribution that an entry point is of; None where it is of none, or of what is left of one."""
    if point.dist is None or leftover_path(point) is not None:
        return None
    return Installed(point.dist.name, point.dist.version)


def leftover_path(point: EntryPoint) -> str | None:
    """Where a distribution lies that was half uninstalled: without METADATA, or renamed by pip to be deleted."""
    dist = point.dist
    if dist is None:
        return None
    path = str(getattr(dist, "_path", None) or dist.locate_file(""))
    renamed = path.replace("\\", "/").rpartition("/")[2].startswith("~")
    return path if renamed or not _named(dist) else None


def versions() -> dict[str, str]:
    """{distribution: version} of all that have an entry point of ours, those that are left over apart."""
    found = (find_distribution(point) for point in entry_points(group=GROUP))
    return dict(sorted(each for each in found if each is not None))


def _named(dist: Distribution) -> bool:
    """Whether it tells its name and version: without METADATA they are None, or an error in later Pythons."""
    try:
        return bool(dist.name) and bool(dist.version)
    except Exception:
        return False
