"""Lay out completions of a rollout for a reader at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.rollouts.rollout import Rollout, mean_advantage

if TYPE_CHECKING:
    from rlhf_core.rewards.reward import Reward

LONGEST = 1000
"""Characters of a completion to print; the samples have all of them."""
PROMPT = 200
"""Characters of a prompt to print, its last."""


def completion_lines(rollout: Rollout, rewards: Sequence[Reward], count: int) -> Iterator[str]:
    """Yield a text of several lines per completion, `count` of them, evenly spread over the rollout.

    Control characters are left to the printer, which escapes them. A line of a completion cannot pass for one of ours:
    it stands behind a bar.
    """
    assert rollout.inputs is not None
    total = len(rollout.total)
    for i in np.linspace(0, total - 1, min(count, total)).astype(int).tolist():
        values = [("reward", rollout.total[i]), *_rewards(rollout, rewards, i)] if rewards else []
        if len(rollout.advantages):
            values.append(("advantage", mean_advantage(rollout, i)))
        cut = "" if rollout.samples.finished[i] else ", cut"
        numbers = "".join(f"{name} {'–' if np.isnan(value) else f'{value:.4g}'}  " for name, value in values)
        prompt = " ".join(_text(rollout.inputs.prompts[i]).split())
        prompt = prompt if len(prompt) <= PROMPT else f"…{prompt[1 - PROMPT :]}"
        completion = _text(rollout.inputs.completions[i])
        if len(completion) > LONGEST:
            completion = f"{completion[:LONGEST]}… ({len(completion):,} characters)"
        yield (
            f"completion {i + 1:,} of {total:,}  {numbers}{int(rollout.samples.mask[i].sum()):,} tokens{cut}\n"
            f"  after {prompt}\n" + textwrap.indent(completion or "(nothing)", "  │ ", lambda line: True)
        )


def _rewards(rollout: Rollout, rewards: Sequence[Reward], i: int) -> list[tuple[str, float]]:
    """Return each reward's value; none where the only one is the total."""
    values = [(reward.label, rollout.rewards[i, f]) for f, reward in enumerate(rewards)]
    return [] if len(values) == 1 and values[0][1] == rollout.total[i] else values


def _text(said: Any) -> str:
    """Return a text, or the messages of a conversation one after the other; of a single reply its content."""
    if isinstance(said, str):
        return said
    if len(said) == 1 and said[0].get("role") == "assistant" and not said[0].get("tool_calls"):
        return str(said[0].get("content") or "")
    return "\n".join(f"{m.get('role')}: {m.get('content') or m.get('tool_calls') or ''}" for m in said)
