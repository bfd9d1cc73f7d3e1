"""Call an advantage with a rollout's rewards, and check what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import AdvantageInputs
from rlhf_core.errors import InputError, RunError, error_line

if TYPE_CHECKING:
    from rlhf_core.contracts import Advantage
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.rollouts.rollout import Rollout

HERE = str(Path(__file__).parent)


def advantage_inputs(rollout: Rollout, rewards: Sequence[Reward]) -> AdvantageInputs:
    """Group a rollout's rewards by prompt."""
    group, inputs = rollout.group, rollout.inputs
    return AdvantageInputs.of(
        rollout.rewards.reshape(-1, group, len(rewards)),
        np.array([reward.weight for reward in rewards]),
        np.asarray(rollout.samples.lengths, np.int32).reshape(-1, group),
        labels=tuple(reward.label for reward in rewards),
        columns={} if inputs is None else inputs.columns,
        total=rollout.total.reshape(-1, group),
    )


def compute_advantages(
    advantage: Advantage, rollout: Rollout, rewards: Sequence[Reward], *, name: str
) -> NDArray[np.float32]:
    """Compute a rollout's advantages, float32 [N] or [N, C]; see `Rollout.with_advantages`."""
    inputs = advantage_inputs(rollout, rewards)
    what, shape = f"advantage '{name}'", inputs.rewards.shape
    try:
        out = np.asarray(advantage(inputs), np.float32)
    except (InputError, RunError):
        raise
    except Exception as error:
        raise RunError(f"{what} {error_line(error, HERE)}") from error
    longest = int(np.max(inputs.lengths))
    if out.shape != shape and not (out.ndim == 3 and out.shape[:2] == shape and out.shape[2] >= longest):
        raise RunError(
            f"{what} returned an array of shape {list(out.shape)}; wanted is one number per completion, {list(shape)} "
            f"(prompts, and samples of each), or one per token, {[*shape, longest]} or longer"
        )
    if not np.isfinite(out).all():
        prompt, sample, *_ = np.argwhere(~np.isfinite(out))[0]
        raise RunError(
            f"{what} returned {out[prompt, sample]} for sample {sample} of prompt {prompt}, whose rewards are "
            f"{rollout.total.reshape(shape)[prompt].tolist()}; advantages are finite, 0 where there is nothing to learn"
        )
    if out.ndim == 2:
        return out.reshape(-1)
    width = rollout.samples.tokens.shape[1]
    laid = np.zeros((out.shape[0] * out.shape[1], width), np.float32)
    kept = out.reshape(len(laid), -1)[:, :width]
    laid[:, : kept.shape[1]] = kept
    return laid
