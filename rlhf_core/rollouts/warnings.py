"""Warnings about rollouts that teach nothing."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from rlhf_core.rollouts.completions import empty_warning

if TYPE_CHECKING:
    from rlhf_core.rollouts.rollout import Rollout
    from rlhf_core.stage import Stage

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
        """Warn about empty completions in the first rollouts, and about groups without a difference.

        number: of the rollout, from 0.
        """
        assert rollout.inputs is not None
        completions, metrics = rollout.inputs.completions, rollout.metrics
        if rollout.conversations is not None:  # episodes that failed have a warning of their own
            failures = rollout.conversations.failures
            completions = [said for said, why in zip(completions, failures, strict=True) if why is None]
        if number < FIRST_ROLLOUTS and (line := empty_warning(completions)) is not None:
            self._warn("empty", line)
        share = metrics.get("frac_reward_zero_std", 0.0)  # absent where a group is one completion
        self.flat = self.flat + 1 if share == 1 or math.isnan(share) else 0
        if self.flat != FLAT_ROLLOUTS:
            return
        result = (
            "no group had two completions that a reward scored"
            if math.isnan(share)
            else f"every group got one and the same reward, {metrics['reward']:.4g} on average"
        )
        self._warn(
            "flat",
            f"in {self.flat} rollouts one after another {result}: nothing is learned. Read the completions in "
            f"{self.stage.dir / 'samples'}; the prompts may be too hard or too easy, or the reward too coarse",
        )

    def _warn(self, kind: str, line: str) -> None:
        if self.stage.is_main and kind not in self.given:
            warnings.warn(f"stage '{self.stage.name}': {line}", stacklevel=4)
        self.given.add(kind)
