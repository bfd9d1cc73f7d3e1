"""The terminal: which stage runs, how far it is, and what its metrics say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_core.errors import Stopped
from rlhf_core.hookspecs import hookimpl
from rlhf_core.loggers.pace import HEADLINE, Pace, shown
from rlhf_core.loggers.views import View, choose

if TYPE_CHECKING:
    from rlhf_core.contracts import Artifact
    from rlhf_core.stage import Stage


@dataclass(eq=False)
class Console:
    """Shows one stage at a time.

    progress: "rich" or "tqdm", a bar on stderr, or plain lines, one a logged step, where stderr is no
    terminal. "json", one object an event on stdout.
    metrics: names of those beside the bar; None: loss, reward and accuracy.
    """

    progress: Literal["rich", "tqdm", "json"] = "rich"
    metrics: list[str] | None = None
    _view: View | None = field(default=None, init=False, repr=False)

    @hookimpl(tryfirst=True)
    def rlhf_stage_start(self, stage: Stage) -> None:
        if stage.is_main:
            about = f"{shown(stage.dir)} · {_devices(stage)} · seed {stage.seed}"
            names = HEADLINE if self.metrics is None else self.metrics
            self._view = choose(self.progress, stage.name, Pace(stage.dir / "plan.json", names))
            self._view.start(about)

    @hookimpl(tryfirst=True)
    def rlhf_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._view is None:
            return
        training = {name: x for name, x in metrics.items() if not name.startswith("eval_")}
        evaluation = {name: x for name, x in metrics.items() if name.startswith("eval_")}
        if training:
            self._view.pace.mark(step)
            self._view.step(training)
        if evaluation:
            self._view.evaluation(step, evaluation)

    @hookimpl(tryfirst=True)
    def rlhf_artifact_saved(self, artifact: Artifact) -> None:
        if self._view is not None:
            self._view.saved(artifact.name, artifact.kind, shown(Path(artifact.path)))

    @hookimpl(tryfirst=True)
    def rlhf_stage_end(self, error: BaseException | None) -> None:
        if self._view is not None:
            stopped = isinstance(error, (Stopped, KeyboardInterrupt))
            self._view.end("done" if error is None else "stopped" if stopped else "failed")
            self._view = None


def _devices(stage: Stage) -> str:
    """`8 × TPU v5 lite`, or `1 × cpu`."""
    kinds = (
        Counter(device.device_kind for device in stage.mesh.devices.flat) if stage.mesh is not None else {}
    )
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "no devices"
