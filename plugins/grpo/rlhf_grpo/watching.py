"""Warnings about rollouts that teach nothing, once each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.rollouts import empty_warning

if TYPE_CHECKING:
    from rlhf_core import Stage

FLAT_ROLLOUTS = 3
"""So many in a row without a difference within any group are worth a word."""
FIRST_ROLLOUTS = 3
"""Those whose empty completions are counted: later a policy may have learned to say nothing."""


class RolloutWarnings:
    """Looks at every rollout of a stage; the first process warns."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.flat = 0  # rollouts in a row with nothing to compare
        self.said: set[str] = set()

    def look(self, number: int, completions: Sequence[Any], metrics: Mapping[str, float]) -> None:
        """Warn of empty completions in the first rollouts, and of groups without a difference. number: from 0."""
        if number < FIRST_ROLLOUTS and (line := empty_warning(completions)) is not None:
            self._warn("empty", line)
        share = metrics["frac_reward_zero_std"]
        self.flat = self.flat + 1 if share == 1 or math.isnan(share) else 0
        if self.flat != FLAT_ROLLOUTS:
            return
        got = (
            "no group had two completions that a reward scored"
            if math.isnan(share)
            else f"every group got one and the same reward, {metrics['reward']:.4g} on average"
        )
        self._warn(
            "flat",
            f"in {self.flat} rollouts one after another {got}: nothing is learned. Read the completions in "
            f"{self.stage.dir / 'samples'}; the prompts may be too hard or too easy, or the reward too coarse",
        )

    def _warn(self, what: str, line: str) -> None:
        if self.stage.is_main and what not in self.said:
            warnings.warn(f"stage '{self.stage.name}': {line}", stacklevel=4)
        self.said.add(what)
