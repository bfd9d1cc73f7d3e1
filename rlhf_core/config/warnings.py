"""Warn of shared settings that have no effect in a run; shown in a stage's forecast, or where it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig


def config_warnings(config: TrainerConfig, updates: int) -> Iterator[str]:
    """Yield one line per setting, beginning with its name. updates: of the whole run."""
    if config.learning_rate_end is not None and config.scheduler == "constant":
        yield (
            f"learning_rate_end={config.learning_rate_end:g}: cannot act: scheduler is 'constant'; linear, cosine and "
            "wsd fall to it"
        )
    if config.warmup_steps > updates:
        reached = config.learning_rate * updates / config.warmup_steps
        yield (
            f"warmup_steps={config.warmup_steps}: the run has {updates:,} update{'s'[: updates > 1]}, so that the "
            f"learning rate ends at {reached:g} of {config.learning_rate:g}"
        )
