"""Advantages from the rewards of groups, on the host in float64: the arrays are small and the differences matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core import AdvantageInputs

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """(r − mean of its group) / (standard deviation + eps), n − 1 in the deviation (Shao et al. 2024, section 4.1.2).

    scale: "group", "batch" (the deviation of all rewards; the mean stays the group's) or "none" (Dr. GRPO).
    A group whose rewards are all equal has advantage 0 exactly; so has a completion that no function scored.
    """

    scale: Literal["group", "batch", "none"] = "group"
    eps: float = 1e-4

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.float32]:
        rewards = _rewards(inputs)
        return _finish(_scaled(rewards, self.scale, self.eps))


@dataclass(frozen=True)
class NormalizeThenSum:
    """Normalise each function's rewards within the group, sum them with the weights, and normalise the sums over the
    batch (GDPO, Liu et al. 2026), so that a function of small spread counts as much as one of large spread.
    """

    eps: float = 1e-4

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.float32]:
        exact = inputs.rewards_by_function64
        each = np.asarray(inputs.rewards_by_function if exact is None else exact, np.float64)
        weights = np.asarray(inputs.weights, np.float64)
        parts = np.stack([_scaled(each[..., f], "group", self.eps) for f in range(each.shape[-1])], axis=-1)
        scored = ~np.isnan(each).all(-1)
        # Parts are centred within each group, so that the mean of the sums over the batch is 0 already.
        total = np.where(scored, (np.nan_to_num(parts) * weights).sum(-1), np.nan)
        return _finish(total / (_deviation(total, axis=None) + self.eps))


@dataclass(frozen=True)
class RLOO:
    """r − mean of the other rewards of its group (REINFORCE leave-one-out, Ahmadian et al. 2024).

    With n scored completions that is n / (n − 1) times r − mean of the group; one alone has advantage 0.
    """

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.float32]:
        rewards = _rewards(inputs)
        count = (~np.isnan(rewards)).sum(-1, keepdims=True)
        return _finish(_centred(rewards) * count / np.maximum(count - 1, 1))


@dataclass(frozen=True)
class ReinforcePP:
    """(r − baseline), normalised over the batch (REINFORCE++, Hu et al. 2025).

    baseline: "group", the mean of the group (REINFORCE++-baseline): a constant group has advantage 0 exactly; or
    "batch", the mean of all rewards (REINFORCE++): there a constant group above or below it has an advantage.
    """

    baseline: Literal["group", "batch"] = "group"
    eps: float = 1e-4

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.float32]:
        rewards = _rewards(inputs)
        if self.baseline == "group":
            # Its mean over the batch is 0 but for rounding, which must not reach the groups without a difference.
            centred = _centred(rewards)
        else:
            centred = _centred(rewards.reshape(-1)).reshape(rewards.shape)
        return _finish(centred / (_deviation(centred, axis=None) + self.eps))


def group_advantages(
    rewards: Any,
    *,
    num_generations: int,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-4,
    weights: Sequence[float] | None = None,
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
) -> jax.Array:
    """Compute the advantages of completions that lie group after group.

    rewards: numbers [N] or [N, functions], read as float64; NaN: the function does not apply.
    weights: one per function, default 1.

    Deviations are taken with n − 1; completions that no function scored have advantage 0 and are left out of every
    mean and deviation. Returns float32 [N]. Raises ValueError if N is not a multiple of num_generations, or a group
    has a single member, which has nothing to be compared with.
    """
    each = np.asarray(rewards, np.float64)
    each = each[:, None] if each.ndim == 1 else each
    n, functions = each.shape
    if num_generations < 2:
        raise ValueError("num_generations=1: a group of one has no advantage; use at least 2")
    if n % num_generations:
        raise ValueError(f"{n} rewards are not whole groups of num_generations={num_generations}")
    chosen = np.ones(functions) if weights is None else np.asarray(weights, np.float64)
    if chosen.shape != (functions,):
        raise ValueError(f"weights: {chosen.size} for {functions} reward functions")
    grouped = each.reshape(-1, num_generations, functions)
    inputs = AdvantageInputs.of(grouped, chosen, np.zeros(grouped.shape[:2], np.int32))
    if aggregation == "normalize_then_sum":
        out = NormalizeThenSum(eps)(inputs)
    elif aggregation == "sum_then_normalize":
        out = Group(scale, eps)(inputs)
    else:
        raise ValueError(f"aggregation: '{aggregation}' is not sum_then_normalize or normalize_then_sum")
    return jnp.asarray(out.reshape(-1))


def _rewards(inputs: AdvantageInputs) -> Floats:
    """Return the total rewards as exactly as they are known."""
    return np.asarray(inputs.rewards if inputs.rewards64 is None else inputs.rewards64, np.float64)


def _centred(rewards: Floats) -> Floats:
    """rewards − their mean along the last axis; NaN where not scored."""
    # Rounding of a mean must not be blown up by division: what is constant has no advantage.
    constant = AdvantageInputs.all_equal(rewards)[..., None] & ~np.isnan(rewards)
    return np.where(constant, 0.0, rewards - _mean(rewards, axis=-1))


def _scaled(rewards: Floats, scale: str, eps: float) -> Floats:
    centred = _centred(rewards)
    if scale == "none":
        return centred
    if scale not in ("group", "batch"):
        raise ValueError(f"scale: '{scale}' is not one of group, batch, none")
    return centred / (_deviation(rewards, axis=-1 if scale == "group" else None) + eps)


def _mean(x: Floats, axis: int | None) -> Floats:
    there = ~np.isnan(x)
    count = there.sum(axis=axis, keepdims=True)
    return np.where(there, x, 0.0).sum(axis=axis, keepdims=True) / np.maximum(count, 1)


def _deviation(x: Floats, axis: int | None) -> Floats:
    """With n − 1; 0 for fewer than two elements."""
    there = ~np.isnan(x)
    count = there.sum(axis=axis, keepdims=True)
    squares = (np.where(there, x - _mean(x, axis), 0.0) ** 2).sum(axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def _finish(advantages: Floats) -> NDArray[np.float32]:
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)
