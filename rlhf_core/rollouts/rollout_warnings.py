"""Warn of rollouts that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.contracts import all_equal
from rlhf_core.data.columns import is_blank
from rlhf_core.errors import warn
from rlhf_core.rollouts.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_core.stage import Stage
    from rlhf_core.tokenizer.encoding import Turns

FLAT_ROLLOUTS = 3
"""Rollouts in a row without a difference within any group before the warning."""
FIRST_ROLLOUTS = 3
"""Rollouts whose empty completions are counted: later a policy may have learned to say nothing."""


class RolloutWarnings:
    """Checks every rollout of a stage; the first process warns, once per kind of warning."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.flat = 0  # rollouts in a row with nothing to compare
        self.given: set[str] = set()

    def check(self, number: int, rollout: Rollout) -> None:
        """Warn about empty completions in the first rollouts, and about groups without a difference, or one
        that float32 loses.

        number: of the rollout, from 0.
        """
        completions = [rollout.said(i)[1] for i in range(len(rollout.total))]
        metrics = rollout.metrics
        if (
            rollout.conversations is not None and rollout.inputs is not None
        ):  # failed ones have a warning of their own
            failures = rollout.conversations.failures
            completions = [said for said, why in zip(completions, failures, strict=True) if why is None]
        line = empty_warning(completions) if number < FIRST_ROLLOUTS else None
        if line is not None:
            self._warn("empty", line)
        pair = lost_difference(rollout)
        if pair is not None:
            self._warn(
                "float32",
                f"rewards of a group, such as {pair[0]!r} and {pair[1]!r}, differ by less than float32 holds: the "
                "built-in advantages compare them in float64, but losses, and advantages that read `rewards`, "
                "see them as equal. Subtract a constant in the reward",
            )
        share = metrics.get("frac_reward_zero_std", 0.0)  # absent where a group is one completion
        self.flat = self.flat + 1 if share == 1 or math.isnan(share) else 0
        if self.flat != FLAT_ROLLOUTS:
            return
        result = (
            "no group had two completions that a reward scored"
            if math.isnan(share)
            else f"every group got the same reward, {metrics['reward']:.4g} on average"
        )
        self._warn(
            "flat",
            f"in {self.flat} consecutive rollouts, {result}: nothing is learned. Read the completions in "
            f"{self.stage.dir / 'samples'}; the prompts may be too hard or too easy, or the reward too coarse",
        )

    def _warn(self, kind: str, line: str) -> None:
        if self.stage.is_main and kind not in self.given:
            warn(f"stage '{self.stage.name}': {line}")
        self.given.add(kind)


def lost_difference(rollout: Rollout) -> tuple[float, float] | None:
    """Find a group whose rewards differ, but by less than float32 holds at their size: (lowest, highest)."""
    total = rollout.total.reshape(len(rollout.prompts), -1)
    for values in total[~all_equal(total)]:
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if high - low < np.spacing(np.float32(max(abs(low), abs(high)))):
            return low, high
    return None


def empty_warning(completions: Sequence[Turns]) -> str | None:
    """Return a warning if more than half of the completions, texts or message lists, are empty, else None."""
    empty = sum(map(is_blank, completions))
    if empty * 2 <= len(completions):
        return None
    return (
        f"{empty:,} of {len(completions):,} completions are empty: the model stops immediately, as chat models do "
        'after plain text; write prompts as messages, [{"role": "user", "content": …}], so that its chat template is '
        "used"
    )
