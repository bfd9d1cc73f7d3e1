"""Identify the run that a checkpoint belongs to, and compare before a run continues from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import SHOWN, InputError
from rlhf_core.stage import differences, experiment

if TYPE_CHECKING:
    from rlhf_core.checkpoint import Restored
    from rlhf_core.config import TrainerConfig
    from rlhf_core.fit.batches import UpdateSource
    from rlhf_core.optimizers import Schedule
    from rlhf_core.stage import Stage

ROWS = "data_rows"
"""The name of the rows' digests in a checkpoint's arrays."""
RATES = 17
"""Past updates whose learning rate is saved, to notice where another length of the run changes them."""


class Continuation:
    """The identity of a run in its checkpoints: the experiment, a digest per row of the data, past learning rates."""

    def __init__(
        self, stage: Stage, config: TrainerConfig, updates: UpdateSource, schedule: Schedule
    ) -> None:
        self.stage, self.config, self.updates, self.schedule = stage, config, updates, schedule

    @cached_property
    def experiment(self) -> differences.Record:
        """The experiment that the stage was started with, or that of a trainer called without one."""
        stage = self.stage
        if stage.experiment is not None:
            return stage.experiment
        return experiment.of_objects(stage.name, stage.seed, self.config, stage.inputs, stage.registry)

    @cached_property
    def rows(self) -> NDArray[np.uint64]:
        return self.updates.data.row_digests()

    def host(self, step: int) -> dict[str, Any]:
        """Return the JSON part of a checkpoint after `step` updates."""
        return {
            "experiment": {"digest": differences.digest(self.experiment), **self.experiment},
            "rows": len(self.rows),
            "total": self.updates.total,
            "rates": {str(at): self._rate(at) for at in _sampled(step)},
        }

    def arrays(self) -> dict[str, np.ndarray]:
        return {ROWS: self.rows}

    def accept(self, saved: Restored) -> None:
        """Raise InputError where a checkpoint belongs to another run; warn where unused rows have changed.

        Called before the state is read.
        """
        self._require_experiment(saved)
        self._require_rows(saved)  # fewer rows may be what makes the run shorter
        if saved.step > self.updates.total:
            raise InputError(
                f"stage '{self.stage.name}': {differences.too_short(saved.step, self.updates.total)}"
            )
        if saved.host["total"] != self.updates.total:
            self._require_rates(saved)

    def _require_experiment(self, saved: Restored) -> None:
        recorded = saved.host.get("experiment")
        if recorded is None:
            self._refuse(saved, "it was written by another version of this suite, which did not record that")
        if recorded["digest"] == differences.digest(self.experiment):
            return
        accepted = {each["field"] for each in self.experiment.get("accepted", ())}
        changes = differences.compare(recorded, self.experiment).refused
        if refused := [change for change in changes if change.field not in accepted]:
            self._refuse(saved, *map(str, refused))

    def _require_rates(self, saved: Restored) -> None:
        for at, rate in saved.host["rates"].items():
            now = self._rate(int(at))
            if not np.isclose(rate, now, rtol=1e-5, atol=0.0):
                raise InputError(
                    f"stage '{self.stage.name}': with {self.updates.total:,} updates in place of "
                    f"{saved.host['total']:,}, update {int(at) + 1} would have had a learning rate of {now:.6g} rather "
                    f"than {rate:.6g}; give back the length it had, "
                    'or use scheduler = "constant" for runs that are to be extended',
                )

    def _require_rows(self, saved: Restored) -> None:
        before, now = saved.arrays[ROWS], self.rows
        if len(before) != len(now):
            self._refuse(
                saved,
                f"train_data: it had {len(before):,} rows for training and has {len(now):,} now; give back the rows "
                "that were added or left out",
            )
        changed = np.flatnonzero(before != now)
        if not len(changed):
            return
        drawn = np.intersect1d(changed, self.updates.drawn(saved.step, saved.host["updates"]))
        if len(drawn):
            self._refuse(
                saved,
                f"train_data: {self._listed(drawn)} changed after it was trained on; give back what was there",
            )
        if self.stage.is_main:
            warnings.warn(
                f"stage '{self.stage.name}'.train_data: {self._listed(changed)} changed since the checkpoint at update "
                f"{saved.step}; no update has drawn it yet, so the run goes on with what is there now",
                stacklevel=2,
            )

    def _listed(self, rows: NDArray[np.int64]) -> str:
        names = [self.updates.data.where(int(i)) for i in rows[:SHOWN]]
        more = f" and {len(rows) - SHOWN:,} more rows" if len(rows) > SHOWN else ""
        return ", ".join(names) + more

    def _refuse(self, saved: Restored, *problems: str) -> NoReturn:
        name = f"stage '{self.stage.name}'"
        raise InputError(
            *(f"{name}.{problem}" if ": " in problem else f"{name}: {problem}" for problem in problems),
            f"{name}: the checkpoint at update {saved.step} belongs to another run: give back what it had, use another "
            f"directory, or delete {self.stage.dir}",
        )

    def _rate(self, step: int) -> float:
        return float(self.schedule(jnp.int32(step)))


def _sampled(step: int) -> list[int]:
    """Choose up to `RATES` updates before `step`, the first and the last among them."""
    return sorted({int(at) for at in np.linspace(0, step - 1, RATES)}) if step > 0 else []


def without_rows(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a checkpoint's arrays without those of the loop itself."""
    return {name: array for name, array in arrays.items() if name != ROWS}
