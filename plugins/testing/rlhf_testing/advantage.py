"""Check advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import ADVANTAGE, AdvantageInputs
from rlhf_core.errors import error_line
from rlhf_testing.findings import (
    KITS,
    Broken,
    Findings,
    check_hash,
    make_component,
    require_close,
    require_finite,
)

NAN = np.nan
FUNCTIONS = 2
"""Reward functions in an advantage's inputs."""
REWARDS = ((0.1, 0.9, 0.4, 0.6), (1.0, 1.0, 0.0, 0.5), (-2.0, 0.3, 0.2, 1.5))


def check_advantage(advantage: Any, *, values: tuple[float, float] | None = None) -> None:
    """Raise AssertionError that lists every property that `advantage` breaks.

    advantage: the registered frozen dataclass or function, or an object of it with other options.
    values: the least and the largest reward that it is made for, such as (0.0, 1.0); None: any number.

    component: it can be registered.
    hash: objects with equal options are equal.
    output: float32 [prompts, samples]; or [prompts, samples, time], one per token: the properties below then hold for
        their mean over the tokens of a completion.
    finite: also where all rewards of a group are equal, huge, or missing (NaN).
    unscored: a completion without a reward has advantage 0.
    order: reordering prompts and samples reorders the advantages.
    direction: within a group a higher reward never has a lower advantage, and some have a higher one.
    arrays: NumPy and jax arrays give the same. inputs: a call does not change them.
    repeatable: a second call gives the same.
    """
    findings = Findings("advantage", advantage)
    advantage = make_component(findings, ADVANTAGE, advantage)
    check_hash(findings, advantage)
    table = _within(REWARDS, values)
    base = example(table)
    with findings.property("output", base):
        try:
            out = advantage(example(table))
        except (IndexError, ValueError, TypeError) as error:
            raise Broken(
                f"{error_line(error, KITS)}; the kit gives {FUNCTIONS} reward functions, rewards_by_function of shape "
                f"{list(base.rewards_by_function.shape)}"
            ) from error
        shape, longest = base.rewards.shape, int(np.max(base.lengths))
        by_token = np.ndim(out) == 3 and np.shape(out)[:2] == shape and np.shape(out)[2] >= longest
        if np.shape(out) != shape and not by_token:
            raise Broken(
                f"shape {list(np.shape(out))}; return one per completion, {list(shape)}, or one per token, "
                f"{[*shape, longest]}"
            )
        if np.asarray(out).dtype != np.float32:
            raise Broken(f"it is {np.asarray(out).dtype}; return float32")
    findings.stop_if_broken()
    if by_token:
        out, advantage = _mean_over_tokens(out, base.lengths), _by_completion(advantage)
    tables = {name: _within(each, values) for name, each in cases().items()}
    for name, each in tables.items():
        with findings.property("finite", example(each)):
            require_finite(advantage(example(each)), name)
    missing = tables["completions that were not scored"]
    with findings.property("unscored", example(missing)):
        found = np.asarray(advantage(example(missing)))
        wrong = np.isnan(missing) & np.isfinite(found) & (found != 0)
        if wrong.any():
            raise Broken(
                f"{wrong.sum()} completions with reward NaN have an advantage, the first {found[wrong][0]:.3g}; "
                "return 0, so that nothing is learned from them"
            )
    _orders(findings, advantage, np.asarray(out), table)
    with findings.property("direction", base):
        _direction(np.asarray(out), table)
    with findings.property("arrays", base):
        rewards, by_function, weights, lengths = (jnp.asarray(x) for x in base[:4])
        on_device = AdvantageInputs(rewards, by_function, weights, lengths, base.labels, base.columns)
        require_close(advantage(on_device), out, "of jax arrays in place of NumPy's", rtol=1e-4)
    with findings.property("inputs"):
        given = example(table)
        advantage(given)
        for name, before, after in zip(AdvantageInputs._fields[:4], base[:4], given[:4], strict=True):
            require_close(after, before, f"inputs.{name} is changed by the call; copy it first", rtol=0.0)
    with findings.property("repeatable"):
        require_close(advantage(example(table)), out, "called again with the same inputs", rtol=0.0)
    findings.end()


def example(rewards: Any) -> AdvantageInputs:
    """Make inputs with two reward functions that agree: each of them, and their weighted sum, is `rewards`."""
    values = np.array(rewards, np.float32)
    lengths = 3 + np.arange(values.size, dtype=np.int32).reshape(values.shape) % 5
    each = np.stack([values] * FUNCTIONS, axis=-1)
    columns = {"number": list(range(values.size))}
    return AdvantageInputs(
        values, each, np.array([0.75, 0.25], np.float32), lengths, ("first", "second"), columns
    )


def _by_completion(advantage: Any) -> Callable[[AdvantageInputs], NDArray[Any]]:
    """Make an advantage per completion of one per token: its mean over the completion's tokens."""
    return lambda inputs: _mean_over_tokens(advantage(inputs), inputs.lengths)


def _mean_over_tokens(values: Any, lengths: Any) -> NDArray[Any]:
    values, lengths = np.asarray(values), np.asarray(lengths)
    there = np.arange(values.shape[2]) < lengths[..., None]
    mean: NDArray[Any] = (np.where(there, values, 0).sum(2) / lengths).astype(values.dtype)
    return mean


def cases() -> dict[str, Any]:
    """Return rewards at which advantages must be finite: {words for messages: rewards}."""
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


def _within(rewards: Any, values: tuple[float, float] | None) -> NDArray[np.float64]:
    """Stretch a table of rewards to a range, its order kept; NaN stays."""
    table = np.array(rewards, float)
    if values is None:
        return table
    least, largest = values
    low, high = np.nanmin(table), np.nanmax(table)
    share = (table - low) / (high - low)
    stretched: NDArray[np.float64] = least + share * (largest - least)
    return stretched


def _orders(findings: Findings, advantage: Any, out: NDArray[Any], table: NDArray[np.float64]) -> None:
    with findings.property("order", example(table)):
        moves: dict[str, Callable[[Any], Any]] = {
            "prompts": lambda x: x[::-1],
            "samples": lambda x: x[:, [2, 0, 3, 1]],
        }
        for what, move in moves.items():
            base = example(table)
            moved = AdvantageInputs(
                move(base.rewards),
                move(base.rewards_by_function),
                base.weights,
                move(base.lengths),
                base.labels,
                {name: move(np.reshape(x, (-1, 4))).ravel().tolist() for name, x in base.columns.items()},
            )
            require_close(advantage(moved), move(out), f"with the {what} in another order", rtol=1e-4)


def _direction(out: NDArray[Any], rewards: NDArray[np.float64]) -> None:
    higher = rewards[:, :, None] > rewards[:, None, :]
    rise = (out[:, :, None] - out[:, None, :])[higher]
    if (rise < -1e-6).any():
        raise Broken(
            f"of {higher.sum()} pairs of a group, {(rise < -1e-6).sum()} have the lower advantage for the higher "
            "reward; advantages are maximised: flip the sign"
        )
    if not (rise > 1e-6).any():
        raise Broken("rewards that differ have equal advantages: nothing would be learned")
