"""Track the best evaluation, stop when none has been better for long, and restore the state it was made of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import InputError, RunError, suggest
from rlhf_core.loggers.jsonl import FILE, read_rows
from rlhf_core.runtime.agreement import broadcast_numbers
from rlhf_core.state import TrainState, abstract_state

if TYPE_CHECKING:
    from rlhf_core.checkpoint import Checkpoints
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage

DEFAULTS = ("eval_accuracy", "eval_reward", "eval_loss")
"""Metrics compared where the config names none: the first of these that an evaluation reports."""
BEST = "best.json"
LOWER = ("loss", "error", "perplexity", "kl")
"""Endings of metrics that are better when lower. So are the parts of a loss, `loss/NAME`; all others are better when
higher."""


WORSE = {"eval_accuracy": -0.05, "eval_loss": 0.05}
"""By how much an evaluation is clearly worse than another: a difference of accuracies, a share of a loss."""


def worse_lines(rows: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """Say, in at most one line, that the evaluation after the last update is clearly worse than an earlier one.

    rows: of metrics.jsonl. step: the last update.
    """
    for name, margin in WORSE.items():
        values = {row["step"]: row[name] for row in rows if isinstance(row.get(name), float)}
        if step not in values:
            continue
        last = values[step]
        best = max(values, key=values.__getitem__) if margin < 0 else min(values, key=values.__getitem__)
        limit = values[best] + (margin if margin < 0 else margin * abs(values[best]))
        if (last - limit) * margin <= 0:
            continue
        others = [other for other in DEFAULTS if any(other in row for row in rows)]
        by = "" if name == others[0] else f' and metric_for_best_model = "{name}"'
        return [
            f"{name} was best after update {best}, {values[best]:.4g}, and is {last:.4g} after update {step}, whose "
            f"model is saved: load_best_model_at_end = true{by} would keep the best"
        ]
    return []


def saved_form(trained: TrainState) -> Callable[[Mapping[str, Any]], TrainState]:
    """Return what a checkpoint holds of a state, by the checkpoint's `host`: all, or all but the optimizer's state."""
    wanted = abstract_state(trained)
    return lambda host: wanted if host.get("optimizer_state", True) else replace(wanted, opt_state=())


class Best:
    """Compare a stage's evaluations.

    metric, value, step: of the best evaluation, None before the first. bad: evaluations since then. All are saved in
    every checkpoint, so that a continued run judges like one that was never stopped. NaN and equal values are not
    better.
    """

    def __init__(self, config: TrainerConfig, stage: Stage) -> None:
        self.config, self.stage = config, stage
        self.metric: str | None = None
        self.value: float | None = None
        self.step: int | None = None
        self.bad = 0

    @property
    def watches(self) -> bool:
        """Return whether the config asks for a comparison."""
        return self.config.compares is not None

    @property
    def exhausted(self) -> bool:
        """Return whether `early_stopping_patience` evaluations in a row were no better."""
        patience = self.config.early_stopping_patience
        return patience is not None and self.bad >= patience

    def choose_metric(self, metrics: Mapping[str, float]) -> str:
        """Return the name of the metric to compare. Raises InputError where the evaluation does not report it."""
        reported = [name for name in metrics if name.startswith("eval_")]
        asked = self.config.metric_for_best_model
        wanted = DEFAULTS if asked is None else (asked, f"eval_{asked}")
        name = next((name for name in wanted if name in reported), None)
        if name is None:
            raise InputError(
                f"stage '{self.stage.name}'.metric_for_best_model: the evaluation does not report "
                f"{asked or ' or '.join(DEFAULTS)}.{suggest(asked or '', reported)} It reports: {', '.join(reported)}"
            )
        return name

    def compare(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether the evaluation after `step` updates is the best so far, so that its state must be saved."""
        if not self.watches:
            return False
        self.metric = self.choose_metric(metrics)
        # A process that judged otherwise would leave the others waiting.
        value = float(broadcast_numbers(metrics[self.metric]))
        greater = self.config.greater_is_better
        if greater is None:
            name = self.metric.removeprefix("eval_")
            greater = not (name.endswith(LOWER) or name.startswith("loss/"))
        better = not math.isnan(value) and (
            self.value is None or (value > self.value if greater else value < self.value)
        )
        if better:
            self.value, self.step, self.bad = value, step, 0
        else:
            self.bad += 1
        return better

    def final(self, state: TrainState, step: int, checkpoints: Checkpoints) -> TrainState:
        """Return the state of the trained model after `step` updates: `state`, or that of the best evaluation.

        Prints the choice and writes it to best.json. `state` is deleted where another replaces it. Raises RunError
        where that one is damaged.
        """
        file = self.stage.dir / FILE
        rows = list(read_rows(file)) if self.stage.is_main and file.is_file() else []
        if not self.watches:
            for line in worse_lines(rows, step):
                self.stage.say(line)
            return state
        if self.exhausted:
            self.stage.say(
                f"stopped early after update {step}: {self.metric} has not improved in {self.bad} evaluations"
            )
        chosen = step if self.step is None or not self.config.load_best_model_at_end else self.step
        self.stage.say(self._choice(chosen, rows))
        if chosen != step:
            state = self._restore(chosen, state, checkpoints)
        if self.stage.is_main:
            record = {**self.to_json(), "updates": step, "model": chosen}
            write_atomic(self.stage.dir / BEST, json.dumps(record) + "\n")
        return state

    def _choice(self, chosen: int, rows: Sequence[Mapping[str, Any]]) -> str:
        """Say which evaluation was best, and the model of which update is kept. rows: of metrics.jsonl."""
        best = "none" if self.step is None else f"{self.value:.6g} after update {self.step}"
        name = self.metric or "evaluation"
        evaluated = [row["step"] for row in rows if name in row]
        without = "; the start was not evaluated: eval_on_start" if evaluated and min(evaluated) else ""
        return f"best {name}: {best}; the trained model is that of update {chosen}{without}"

    def _restore(self, step: int, last: TrainState, checkpoints: Checkpoints) -> TrainState:
        trained = last.trained()
        wanted = saved_form(trained)
        jax.tree.map(lambda x: x.delete(), trained)  # there may not be room for two
        try:
            restored = checkpoints.restore(wanted, step=step)
        except RunError as error:
            raise RunError(
                f"stage '{self.stage.name}': the best evaluation was that after update {step}, but {error}. "
                f"Delete {self.stage.dir} to train it again."
            ) from error
        assert restored is not None
        metrics = restored.host.get("metrics", {})
        self.stage.metrics.clear()  # so that results are those of the trained model
        self.stage.metrics.update({name: math.nan if x is None else x for name, x in metrics.items()})
        return last.with_trained(restored.state)

    def to_json(self) -> dict[str, Any]:
        """Describe the best evaluation for a checkpoint."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "bad": self.bad}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the result of `to_json`."""
        self.metric, self.value, self.step, self.bad = (saved[k] for k in ("metric", "value", "step", "bad"))
