"""Completions kept for reading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.artifacts import write_atomic

if TYPE_CHECKING:
    from rlhf_core.rollouts import Reward
    from rlhf_grpo.drawing import Draw


def write_samples(
    path: Path, drawn: Draw, rewards: Sequence[Reward], advantages: np.ndarray | None = None
) -> None:
    """A line a completion: `prompt`, `completion`, `reward`, the weighted sum, `rewards`, {label: value, null where one
    does not apply}, `advantage`, where there are any, `length`, tokens, and `finished`, false where it was cut.
    """
    lines = []
    for i, text in enumerate(drawn.inputs.completions):
        line = {
            "prompt": drawn.inputs.prompts[i],
            "completion": text,
            "reward": _number(drawn.total[i]),
            "rewards": {reward.label: _number(drawn.each[i, f]) for f, reward in enumerate(rewards)},
            **({} if advantages is None else {"advantage": float(advantages[i])}),
            "length": int(drawn.samples.lengths[i]),
            "finished": bool(drawn.samples.finished[i]),
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_atomic(path, "".join(lines))


def _number(x: float) -> float | None:
    return None if np.isnan(x) else float(x)
