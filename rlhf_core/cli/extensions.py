"""Find what installed distributions add to the command line, without importing any other plugin.

    [project.entry-points."rlhf.commands"]
    report = "rlhf_report.commands:report"

adds the command `rlhf report`: a function whose annotated parameters are its arguments and flags, as typer reads them,
or a `typer.Typer` with subcommands. Its module is imported by `rlhf --help`, so it imports what is slow when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import InputError, error_line
from rlhf_core.runtime import distributions

if TYPE_CHECKING:
    from rlhf_core.plugins import PluginInfo

DISTRIBUTIONS = {
    "audit": "rlhf-audit",
    "chat": "rlhf-remote",
    "compare": "rlhf-report",
    "data": "rlhf-report",
    "demo": "rlhf-tools",
    "doctor": "rlhf-tools",
    "export": "rlhf-tools",
    "generate": "rlhf-remote",
    "new": "rlhf-testing",
    "report": "rlhf-report",
    "schema": "rlhf-tools",
    "score": "rlhf-rewards",
    "serve": "rlhf-serve",
}
"""{command: the distribution of this suite that has it}, for the message where it is missing."""


def find() -> dict[str, list[EntryPoint]]:
    """Find {command: its entry points} in installed distributions."""
    found: dict[str, list[EntryPoint]] = {}
    for point in distributions.find_points(distributions.COMMANDS):
        found.setdefault(point.name, []).append(point)
    return found


def load(name: str, found: Mapping[str, list[EntryPoint]]) -> Any:
    """Import a command, of those that `find` found.

    Raises InputError, with what to type, if none has it, if two have it, and if its import fails.
    """
    points = found.get(name, [])
    if not points:
        raise InputError(f"rlhf {name}: not installed; type: pip install {DISTRIBUTIONS[name]}")
    if len(points) > 1:
        owners = " and ".join(sorted(distributions.owner(point) for point in points))
        raise InputError(f"rlhf {name}: {owners} both have it; uninstall one")
    try:
        return points[0].load()
    except Exception as error:
        raise InputError(
            f"rlhf {name}: {distributions.owner(points[0])} failed to load: {error_line(error)}; uninstall or update it"
        ) from error


def with_commands(plugins: Sequence[PluginInfo]) -> list[PluginInfo]:
    """Add the commands of each distribution to what its plugin registers; a distribution may have only commands."""
    from rlhf_core.plugins import PluginInfo

    infos = list(plugins)
    for name, points in sorted(find().items()):
        owner = next(filter(None, map(distributions.find_distribution, points)), None)
        if owner is None:
            continue
        place = next((i for i, info in enumerate(infos) if info.distribution == owner.name), len(infos))
        if place == len(infos):
            infos.append(PluginInfo(owner.name, *owner, "loaded"))
        components = infos[place].components
        commands = [*components.get("command", []), name]
        infos[place] = replace(infos[place], components={**components, "command": commands})
    return infos
