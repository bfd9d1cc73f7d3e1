"""Check advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
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
ORDINARY = "ordinary values"
REWARDS = ((0.1, 0.9, 0.4, 0.6), (1.0, 1.0, 0.0, 0.5), (-2.0, 0.3, 0.2, 1.5))


def check_advantage(advantage: Any, *, values: tuple[float, float] | Set[float] | None = None) -> None:
    """Raise AssertionError that lists every property that `advantage` breaks.

    advantage: the registered frozen dataclass or function, or an object of it with other options.
    values: the rewards that it is made for: the least and the largest, such as (0.0, 1.0), or a set of all that occur,
        such as {0, 1}; None: any number.

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
    __tracebackhide__ = True
    findings = Findings("advantage", advantage)
    advantage = make_component(findings, ADVANTAGE, advantage)
    check_hash(findings, advantage)
    tables = {name: _within(each, values) for name, each in cases().items()}

    def check(
        name: str, require: Callable[[Any, NDArray[Any]], None], table: NDArray[Any], advantage: Any
    ) -> None:
        findings.check(name, partial(require, advantage), table, smaller(table), shown=example)

    check("output", _require_output, tables[ORDINARY], advantage)
    findings.stop_if_broken()
    advantage = partial(_by_completion, advantage)
    for name, table in tables.items():
        check("finite", partial(_require_finite, name), table, advantage)
    check("unscored", _require_zero, tables["completions that were not scored"], advantage)
    for name, require in PROPERTIES.items():
        check(name, require, tables[ORDINARY], advantage)
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


def smaller(table: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield parts of a table of rewards: two and three completions of a prompt, then two of two prompts."""
    for prompts, samples in ((1, 2), (1, 3), (2, 2)):
        for prompt in range(len(table) - prompts + 1):
            for sample in range(table.shape[1] - samples + 1):
                yield table[prompt : prompt + prompts, sample : sample + samples]


def _by_completion(advantage: Any, inputs: AdvantageInputs) -> NDArray[Any]:
    """Call an advantage; of one per token return the mean over the completion's tokens."""
    values = np.asarray(advantage(inputs))
    lengths = np.asarray(inputs.lengths)
    if values.ndim == 2:
        return values
    there = np.arange(values.shape[2]) < lengths[..., None]
    mean: NDArray[Any] = (np.where(there, values, 0).sum(2) / lengths).astype(values.dtype)
    return mean


def cases() -> dict[str, Any]:
    """Return rewards at which advantages must be finite: {words for messages: rewards}."""
    return {
        ORDINARY: REWARDS,
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


def _within(rewards: Any, values: tuple[float, float] | Set[float] | None) -> NDArray[np.float64]:
    """Move a table of rewards to a range or onto a set, its order kept, ties aside; NaN stays."""
    table = np.array(rewards, float)
    scored = ~np.isnan(table)
    if isinstance(values, Set):
        allowed = np.sort(np.array([*values], float))
        levels = np.unique(table[scored])
        rank = np.searchsorted(levels, table[scored]) / (len(levels) - 1)
        table[scored] = allowed[np.rint(rank * (len(allowed) - 1)).astype(int)]
    elif values is not None:
        least, largest = values
        low, high = np.nanmin(table), np.nanmax(table)
        table = least + (table - low) / (high - low) * (largest - least)
    return table


def _require_output(advantage: Any, table: NDArray[Any]) -> None:
    inputs = example(table)
    shape = inputs.rewards.shape
    longest = int(np.max(inputs.lengths))
    try:
        out = advantage(example(table))
    except (IndexError, ValueError, TypeError) as error:
        raise Broken(
            f"{error_line(error, KITS)}; the kit gives {FUNCTIONS} reward functions, rewards_by_function of shape "
            f"{list(inputs.rewards_by_function.shape)}"
        ) from error
    by_token = np.ndim(out) == 3 and np.shape(out)[:2] == shape and np.shape(out)[2] >= longest
    if np.shape(out) != shape and not by_token:
        raise Broken(
            f"shape {list(np.shape(out))}; return one per completion, {list(shape)}, or one per token, "
            f"{[*shape, longest]}"
        )
    if np.asarray(out).dtype != np.float32:
        raise Broken(f"it is {np.asarray(out).dtype}; return float32")


def _require_finite(what: str, advantage: Any, table: NDArray[Any]) -> None:
    require_finite(advantage(example(table)), what)


def _require_zero(advantage: Any, table: NDArray[Any]) -> None:
    found = np.asarray(advantage(example(table)))
    wrong = np.isnan(table) & np.isfinite(found) & (found != 0)
    if wrong.any():
        raise Broken(
            f"{wrong.sum()} completions with reward NaN have an advantage, the first {found[wrong][0]:.3g}; "
            "return 0, so that nothing is learned from them",
            found=found,
        )


def _require_order(advantage: Any, table: NDArray[Any]) -> None:
    inputs = example(table)
    out = np.asarray(advantage(example(table)))
    moves: dict[str, Callable[[Any], Any]] = {
        "prompts": lambda x: x[::-1],
        "samples": lambda x: np.roll(x, 1, axis=1),
    }
    for what, move in moves.items():
        moved = AdvantageInputs(
            move(inputs.rewards),
            move(inputs.rewards_by_function),
            inputs.weights,
            move(inputs.lengths),
            inputs.labels,
            {name: move(np.reshape(x, table.shape)).ravel().tolist() for name, x in inputs.columns.items()},
        )
        what = f"with the {what} in another order"
        require_close(advantage(moved), move(out), what, rtol=1e-4, changed=moved)


def _require_direction(advantage: Any, table: NDArray[Any]) -> None:
    out = np.asarray(advantage(example(table)))
    higher = table[:, :, None] > table[:, None, :]
    rise = (out[:, :, None] - out[:, None, :])[higher]
    if (rise < -1e-6).any():
        raise Broken(
            f"of {higher.sum()} pairs of a group, {(rise < -1e-6).sum()} have the lower advantage for the higher "
            "reward; advantages are maximised: flip the sign",
            found=out,
        )
    if higher.any() and not (rise > 1e-6).any():
        raise Broken("rewards that differ have equal advantages: nothing would be learned", found=out)


def _require_arrays(advantage: Any, table: NDArray[Any]) -> None:
    inputs = example(table)
    rewards, by_function, weights, lengths = (jnp.asarray(x) for x in inputs[:4])
    on_device = AdvantageInputs(rewards, by_function, weights, lengths, inputs.labels, inputs.columns)
    expected = advantage(example(table))
    require_close(advantage(on_device), expected, "of jax arrays in place of NumPy's", rtol=1e-4)


def _require_inputs(advantage: Any, table: NDArray[Any]) -> None:
    inputs, given = example(table), example(table)
    advantage(given)
    for name, before, after in zip(AdvantageInputs._fields[:4], inputs[:4], given[:4], strict=True):
        require_close(after, before, f"inputs.{name} is changed by the call; copy it first", rtol=0.0)


def _require_repeatable(advantage: Any, table: NDArray[Any]) -> None:
    before = advantage(example(table))
    require_close(advantage(example(table)), before, "called again with the same inputs", rtol=0.0)


PROPERTIES: Mapping[str, Callable[[Any, NDArray[Any]], None]] = {
    "order": _require_order,
    "direction": _require_direction,
    "arrays": _require_arrays,
    "inputs": _require_inputs,
    "repeatable": _require_repeatable,
}
"""{property: raises Broken unless it holds of (advantage, rewards)}, all of ordinary rewards."""
