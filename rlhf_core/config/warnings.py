"""Warn of shared settings that have no effect in a run; shown in a stage's forecast, or where it starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf_core.config.trainer import SCHEDULES
from rlhf_core.errors import counted
from rlhf_core.runtime.machine import platform

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig


OF_A_RATE = ("learning_rate", "learning_rate_end", "scheduler", "warmup_steps")
"""Fields that a schedule takes the place of."""


def config_warnings(
    config: TrainerConfig,
    updates: int,
    optimizers: tuple[Any, Any] = (None, None),
    *,
    planned: bool = False,
) -> Iterator[str]:
    """Yield one line per setting, beginning with its name.

    updates: of the whole run. optimizers: the transformation and the schedule that a trainer was given from Python.
    planned: whether its devices are others than those that are here.
    """
    if config.offload and not planned and platform() == "cpu":
        yield "offload: has no effect on CPUs, whose memory is the host's"
    transformation, schedule = optimizers
    if transformation is not None:
        yield from _replaced(config, ("optimizer", "weight_decay", *OF_A_RATE), "the transformation")
        return
    if schedule is not None:
        yield from _replaced(config, OF_A_RATE, "the schedule")
        return
    if config.scheduler not in SCHEDULES:
        for name in ("learning_rate_end", "warmup_steps"):
            if getattr(config, name):
                yield f"{name}={getattr(config, name):g}: has no effect: the function of `scheduler` sets the rate"
        return
    if config.learning_rate_end is not None and config.scheduler == "constant":
        yield (
            f"learning_rate_end={config.learning_rate_end:g}: has no effect: scheduler is 'constant'; linear, cosine "
            "and wsd fall to it"
        )
    if config.warmup_steps > updates:
        reached = config.learning_rate * updates / config.warmup_steps
        yield (
            f"warmup_steps={config.warmup_steps}: the run has {counted(updates, 'updates')}, so the learning "
            f"rate ends at {reached:g} of {config.learning_rate:g}"
        )


def _replaced(config: TrainerConfig, fields: tuple[str, ...], what: str) -> Iterator[str]:
    """Yield one line per field that is set, and that `what` of the optimizers takes the place of."""
    for name in fields:
        if getattr(config, name) != type(config).model_fields[name].default:
            yield f"{name}: has no effect: {what} of optimizers takes its place"


def batch_warnings(
    config: TrainerConfig, rows: int, *, prompts_per_rollout: int | None = None, num_generations: int = 1
) -> Iterator[str]:
    """Yield a line, beginning with its name, where an update, or a rollout, takes more rows than the data has.

    rows: of the training data. prompts_per_rollout: of a trainer that samples, whose rollouts are always whole.
    """
    size = config.total_batch_size
    taken = prompts_per_rollout or config.total_batch_size
    if taken <= rows or config.max_training_steps == 0:
        return
    endless = config.max_training_steps is not None or prompts_per_rollout is not None
    times = taken / rows if endless else min(taken / rows, config.num_train_epochs)
    kind = "row" if prompts_per_rollout is None else "prompt"
    data = f"total_batch_size={size}: train_data has {counted(rows, f'{kind}s')}"
    if times <= 1:
        yield f"{data}, so the run is a single update on all of them; use a smaller total_batch_size for more"
        return
    fitting = max(size * rows // taken // num_generations, 1) * num_generations
    holds = "an update" if prompts_per_rollout is None else f"a rollout of {taken:,}"
    yield (
        f"{data}, so that {holds} has each of them up to {math.ceil(times)} times: epochs count rows, and updates run "
        f"across their ends; write total_batch_size = {fitting} for an update per epoch"
    )
