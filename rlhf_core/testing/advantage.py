"""The kit for advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import ADVANTAGE, AdvantageInputs
from rlhf_core.errors import error_line
from rlhf_core.testing.findings import KITS, Broken, Findings, hashes, made, require_close, require_finite

NAN = np.nan
FUNCTIONS = 2
"""Reward functions that an advantage is given."""
REWARDS = ((0.1, 0.9, 0.4, 0.6), (1.0, 1.0, 0.0, 0.5), (-2.0, 0.3, 0.2, 1.5))


def check_advantage(advantage: Any) -> None:
    """Raise AssertionError with every property of an advantage that `advantage` lacks.

    advantage: what is registered (a frozen dataclass, or a function), or an object made of it with other options.

    component: it can be registered.
    hash: equal options are equal.
    output: float32 [prompts, samples].
    finite: also where all rewards of a group are equal, are huge, or were not scored (NaN).
    unscored: a completion that was not scored has advantage 0.
    order: prompts and samples in another order have the same advantages in that order.
    direction: within a group a higher reward never has a lower advantage, and some have a higher one.
    arrays: NumPy's and jax's give the same. inputs: what it is given stays as it is.
    repeatable: called again, it gives the same.
    """
    found = Findings("advantage", advantage)
    advantage = made(found, ADVANTAGE, advantage)
    hashes(found, advantage)
    base = example(REWARDS)
    with found.property("output"):
        try:
            out = advantage(example(REWARDS))
        except (IndexError, ValueError, TypeError) as error:
            raise Broken(
                f"{error_line(error, KITS)}; the kit gives {FUNCTIONS} reward functions, rewards_by_function of shape "
                f"{list(base.rewards_by_function.shape)}"
            ) from error
        if np.shape(out) != base.rewards.shape:
            raise Broken(f"shape {list(np.shape(out))}; return one a completion, {list(base.rewards.shape)}")
        if np.asarray(out).dtype != np.float32:
            raise Broken(f"it is {np.asarray(out).dtype}; return float32")
    found.stop_if_broken()
    for name, rewards in cases().items():
        with found.property("finite"):
            require_finite(advantage(example(rewards)), name)
    with found.property("unscored"):
        rewards = np.array(cases()["completions that were not scored"])
        values = np.asarray(advantage(example(rewards)))
        wrong = np.isnan(rewards) & np.isfinite(values) & (values != 0)
        if wrong.any():
            raise Broken(
                f"{wrong.sum()} completions with reward NaN have an advantage, the first {values[wrong][0]:.3g}; "
                "return 0, so that nothing is learned from them"
            )
    _orders(found, advantage, np.asarray(out))
    with found.property("direction"):
        _direction(np.asarray(out))
    with found.property("arrays"):
        on_device = AdvantageInputs(*(jnp.asarray(x) for x in base))
        require_close(advantage(on_device), out, "of jax arrays in place of NumPy's", rtol=1e-4)
    with found.property("inputs"):
        given = example(REWARDS)
        advantage(given)
        for name, before, after in zip(AdvantageInputs._fields, base, given, strict=True):
            require_close(after, before, f"inputs.{name} is changed by the call; copy it first", rtol=0.0)
    with found.property("repeatable"):
        require_close(advantage(example(REWARDS)), out, "called again with the same inputs", rtol=0.0)
    found.end()


def example(rewards: Any) -> AdvantageInputs:
    """Make inputs of two reward functions that agree, so that each of them and their weighted sum is `rewards`."""
    values = np.array(rewards, np.float32)
    lengths = 3 + np.arange(values.size, dtype=np.int32).reshape(values.shape) % 5
    each = np.stack([values] * FUNCTIONS, axis=-1)
    return AdvantageInputs(values, each, np.array([0.75, 0.25], np.float32), lengths)


def cases() -> dict[str, Any]:
    """Rewards at which advantages must be finite, by what messages call them."""
    return {
        "ordinary values": REWARDS,
        "equal rewards": [[0.3] * 4, [0.1] * 4],
        "huge rewards": [[1e6, -1e6, 0.0, 1e6], [1e6, 1e6, 1e6, 1e6]],
        "completions that were not scored": [
            [0.1, NAN, 0.4, 0.6],
            [NAN, NAN, NAN, 0.5],
            [0.2, 0.1, 0.2, 0.9],
        ],
        "a group that was not scored": [[NAN] * 4, [0.1, 0.2, 0.3, 0.4]],
        "one prompt": [[0.1, 0.7, 0.4, 0.6]],
        "pairs": [[0.1, 0.7], [0.5, 0.5]],
    }


def _orders(found: Findings, advantage: Any, out: NDArray[Any]) -> None:
    with found.property("order"):
        moves: dict[str, Callable[[Any], Any]] = {
            "prompts": lambda x: x[::-1],
            "samples": lambda x: x[:, [2, 0, 3, 1]],
        }
        for what, move in moves.items():
            base = example(REWARDS)
            moved = AdvantageInputs(
                move(base.rewards), move(base.rewards_by_function), base.weights, move(base.lengths)
            )
            require_close(advantage(moved), move(out), f"with the {what} in another order", rtol=1e-4)


def _direction(out: NDArray[Any]) -> None:
    rewards = np.array(REWARDS)
    higher = rewards[:, :, None] > rewards[:, None, :]
    rise = (out[:, :, None] - out[:, None, :])[higher]
    if (rise < -1e-6).any():
        raise Broken(
            f"of {higher.sum()} pairs of a group, {(rise < -1e-6).sum()} have the lower advantage for the higher "
            "reward; advantages are maximised: turn the sign"
        )
    if not (rise > 1e-6).any():
        raise Broken("rewards that differ have equal advantages: nothing would be learned")
