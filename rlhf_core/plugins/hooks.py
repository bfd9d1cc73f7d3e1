"""The five hooks of the host `rlhf`, complete.

    register (once a plugin, when it loads)
    stage_start → step_end × n → artifact_saved × outputs → stage_end

Hooks run on the host, on every process, never under jit. An implementation may take fewer arguments than the
hook has. Nothing may rely on the order in which implementations of a hook are called, but that metrics.jsonl and the
console come before the loggers that a stage names. An exception ends the run and is told with the logger or plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rlhf_core.contracts import Artifact
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.stage import Stage

hookspec = pluggy.HookspecMarker("rlhf")
hookimpl = pluggy.HookimplMarker("rlhf")
"""Decorates a plugin's implementation of a hook; without it pluggy would not see the function."""


@hookspec(historic=True)
def rlhf_register(registry: Registry) -> None:
    """Add named components with `registry.add(KIND, "name", thing)`. Which plugin comes first never matters.

    Called once for every plugin, also for one that arrives late (a file, a notebook, a test).
    """


@hookspec
def rlhf_stage_start(stage: Stage) -> None:
    """A trainer is about to run in `stage`."""


@hookspec
def rlhf_step_end(stage: Stage, step: int, metrics: Mapping[str, float]) -> None:
    """An update is done and its metrics are read: host floats under the names in metrics.jsonl.

    step: updates done so far; 0 for an evaluation before the first. Metrics of an evaluation have `eval_` in front of
    their names, and come in one call with those of an update that is logged too. After a run was killed, the updates
    since its newest checkpoint are done, and told, again.
    """


@hookspec
def rlhf_artifact_saved(stage: Stage, artifact: Artifact) -> None:
    """The artifact is complete on disk, its manifest included."""


@hookspec
def rlhf_stage_end(stage: Stage, error: BaseException | None) -> None:
    """The stage is over: always called, and last. Where it went well, its record says so already.

    error: what ended it, raised again afterwards; None if all went well. What this hook raises beside it is a warning.
    """
