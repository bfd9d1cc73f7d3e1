"""The best evaluation so far: which it was, when there is no hope of a better one, and the state it was made of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import InputError, RunError, suggest
from rlhf_core.runtime.agreement import broadcast_numbers
from rlhf_core.stage.files import BEST
from rlhf_core.state import TrainState, abstract_state

if TYPE_CHECKING:
    from rlhf_core.checkpoint import Checkpoints
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage

DEFAULTS = ("eval_accuracy", "eval_reward", "eval_loss")
"""What is compared where the config does not say it: the first of these that an evaluation reports."""
LOWER = ("loss", "error", "perplexity", "kl")
"""Metrics that end so are better the lower they are; all others the higher."""


class Best:
    """Compares a stage's evaluations.

    metric, value, step: of the best so far, None before the first. bad: evaluations since then. They are part of every
    checkpoint, so that a run which goes on judges as one that was never stopped. A value that is not a number is not
    better than any; an equal one is not better either.
    """

    def __init__(self, config: TrainerConfig, stage: Stage) -> None:
        self.config, self.stage = config, stage
        self.metric: str | None = None
        self.value: float | None = None
        self.step: int | None = None
        self.bad = 0

    @property
    def watches(self) -> bool:
        """Whether the config asks for a comparison."""
        return self.config.compares is not None

    @property
    def exhausted(self) -> bool:
        """Whether so many evaluations were no better that training ends."""
        patience = self.config.early_stopping_patience
        return patience is not None and self.bad >= patience

    def name(self, metrics: Mapping[str, float]) -> str:
        """Of the metric that is compared. Raises InputError where the evaluation does not report it."""
        found = [name for name in metrics if name.startswith("eval_")]
        asked = self.config.metric_for_best_model
        wanted = DEFAULTS if asked is None else (asked, f"eval_{asked}")
        name = next((name for name in wanted if name in found), None)
        if name is None:
            raise InputError(
                f"stage '{self.stage.name}'.metric_for_best_model: the evaluation does not report "
                f"{asked or ' or '.join(DEFAULTS)}.{suggest(asked or '', found)} It reports: {', '.join(found)}"
            )
        return name

    def see(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare the evaluation after `step` updates; True where it is the best so far, and its state to be kept."""
        if not self.watches:
            return False
        self.metric = self.name(metrics)
        # The same on all: a process that judged differently would leave the others waiting.
        value = float(broadcast_numbers(metrics[self.metric]))
        greater = self.config.greater_is_better
        if greater is None:
            greater = not self.metric.endswith(LOWER)
        better = not math.isnan(value) and (
            self.value is None or (value > self.value if greater else value < self.value)
        )
        if better:
            self.value, self.step, self.bad = value, step, 0
        else:
            self.bad += 1
        return better

    def final(self, state: TrainState, step: int, checkpoints: Checkpoints) -> TrainState:
        """What the trained model is made of, after `step` updates: `state`, or that of the best evaluation.

        Says what was chosen, and writes it to best.json. `state` is gone where another takes its place. Raises RunError
        where that other one is damaged.
        """
        if not self.watches:
            return state
        if self.exhausted:
            self.stage.say(
                f"stopped early after update {step}: no better {self.metric} in {self.bad} evaluations"
            )
        taken = step if self.step is None or not self.config.load_best_model_at_end else self.step
        best = "none" if self.step is None else f"{self.value:.6g} after update {self.step}"
        name = self.metric or "evaluation"
        self.stage.say(f"best {name}: {best}; the trained model is that of update {taken}")
        if taken != step:
            state = self._restore(taken, state, checkpoints)
        if self.stage.is_main:
            record = {**self.to_json(), "updates": step, "model": taken}
            write_atomic(self.stage.dir / BEST, json.dumps(record) + "\n")
        return state

    def _restore(self, step: int, last: TrainState, checkpoints: Checkpoints) -> TrainState:
        trained = last.trained()
        wanted = abstract_state(trained)
        jax.tree.map(lambda x: x.delete(), trained)  # there may not be room for two
        try:
            found = checkpoints.restore(wanted, step=step)
        except RunError as error:
            raise RunError(
                f"stage '{self.stage.name}': the best evaluation was that after update {step}, but {error}. "
                f"Delete {self.stage.dir} to train it anew."
            ) from error
        assert found is not None
        return last.with_trained(found.state)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "bad": self.bad}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """The inverse of `to_json`."""
        self.metric, self.value, self.step, self.bad = (kept[k] for k in ("metric", "value", "step", "bad"))
