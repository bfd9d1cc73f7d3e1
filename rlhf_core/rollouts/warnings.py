"""Warnings about rollouts that teach nothing."""

from __future__ import annotations

import json
import math
import textwrap
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core import artifacts
from rlhf_core.contracts import all_equal
from rlhf_core.rollouts.completions import empty_warning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.config import TrainerConfig
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.rollouts.rollout import Rollout
    from rlhf_core.stage import Stage

FLAT_ROLLOUTS = 3
"""Rollouts in a row without a difference within any group before the warning."""
UNSCORED = 0.1
"""Share of completions without a value above which a reward is warned of."""
FIRST_ROLLOUTS = 3
"""Rollouts whose empty completions are counted: later a policy may have learned to say nothing."""


def system_prompt_warnings(config: TrainerConfig, rewards: Sequence[Reward], stage: Stage) -> list[str]:
    """Describe the reward models that read conversations with another system prompt than the policy, one line each."""
    lines = []
    for reward in rewards:
        model = getattr(reward.function, "model", None)
        if not isinstance(model, str | Path):
            continue
        planned = stage.inputs.get("system_prompts", {})  # of stages that are only checked
        if str(model) not in planned and not Path(model).is_dir():
            continue
        theirs = planned[str(model)] if str(model) in planned else _system_prompt_of(Path(model), config)
        if theirs != config.system_prompt:
            lines.append(
                f"rewards.{reward.label}: the reward model reads conversations with {_named(theirs)}, the policy with "
                f"{_named(config.system_prompt)}, unless they begin with a system message of their own: it "
                "scores something other than what the policy sees. Give both stages the same system_prompt"
            )
    return lines


def _system_prompt_of(directory: Path, config: TrainerConfig) -> str | None:
    """Return the system prompt in a reward model's contract, or the policy's where an exported template has it."""
    if (directory / artifacts.MANIFEST).is_file():
        prompt: str | None = artifacts.read_contract(directory).get("system_prompt")
        return prompt
    template = directory / "chat_template.jinja"
    exported = template.is_file() and json.dumps(config.system_prompt) in template.read_text(encoding="utf-8")
    return config.system_prompt if exported else None


def _named(system_prompt: str | None) -> str:
    if system_prompt is None:
        return "no system_prompt"
    return f"the system_prompt {textwrap.shorten(system_prompt, 60, placeholder=' …')!r}"


class RolloutWarnings:
    """Checks every rollout of a stage; the first process warns, once per kind of warning."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.flat = 0  # rollouts in a row with nothing to compare
        self.given: set[str] = set()

    def check(self, number: int, rollout: Rollout) -> None:
        """Warn about empty completions in the first rollouts, and about groups with no difference or one that is lost.

        number: of the rollout, from 0.
        """
        assert rollout.inputs is not None
        completions, metrics = rollout.inputs.completions, rollout.metrics
        if rollout.conversations is not None:  # episodes that failed have a warning of their own
            failures = rollout.conversations.failures
            completions = [said for said, why in zip(completions, failures, strict=True) if why is None]
        if number < FIRST_ROLLOUTS and (line := empty_warning(completions)) is not None:
            self._warn("empty", line)
        if (pair := _lost_difference(rollout)) is not None:
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
            warnings.warn(f"stage '{self.stage.name}': {line}", stacklevel=4)
        self.given.add(kind)


def warn_of_unscored(stage: Stage, rewards: Sequence[Reward], rollout: Rollout) -> None:
    """Warn, once per reward, where it left more than UNSCORED of the completions without a value.

    A reward that applies to none of a prompt's completions may be meant for other prompts: these count where no reward
    applies. Episodes that failed have a warning of their own.
    """
    shape = len(rollout.prompts), rollout.group
    said = rollout.conversations
    held = np.array([True] * len(rollout.total) if said is None else [why is None for why in said.failures])
    alone = np.isnan(rollout.total).reshape(shape)
    for f, reward in enumerate(rewards):
        missing = np.isnan(rollout.rewards[:, f]).reshape(shape)
        count = int((missing & (alone | ~missing.all(1, keepdims=True)) & held.reshape(shape)).sum())
        if "unscored" in reward.told or count <= UNSCORED * len(held):
            continue
        reward.told.add("unscored")
        if stage.is_main:
            warnings.warn(
                f"stage '{stage.name}': reward '{reward.label}' left {count} of {len(held)} completions unscored "
                "(None): they are left out of its mean and, if no other reward scored them, of their groups. "
                f"They are null in samples/*.jsonl; the metric is rewards/{reward.label}/unscored",
                stacklevel=2,
            )


def _lost_difference(rollout: Rollout) -> tuple[float, float] | None:
    """Find a group whose rewards differ, but by less than float32 holds at their size: (lowest, highest)."""
    total = rollout.total.reshape(len(rollout.prompts), -1)
    for values in total[~all_equal(total)]:
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if high - low < np.spacing(np.float32(max(abs(low), abs(high)))):
            return low, high
    return None
