"""The kit for pairwise losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import PAIRWISE_LOSS, PairInputs
from rlhf_core.testing.findings import (
    Broken,
    Findings,
    hashes,
    made,
    require_close,
    require_finite,
    require_output,
)

CHOSEN = (0.3, -1.2, 2.0, 0.1, -0.4, 0.9)
REJECTED = (0.1, 0.4, -1.0, 0.7, -0.9, 0.2)
MARGIN = (0.0, 0.5, 0.0, 0.25, 1.0, 0.0)
EXTREME = 1e4

Array = NDArray[np.float32]
Measured: TypeAlias = Callable[[PairInputs], tuple[Array, Array, Array]]
"""(loss of every pair, gradient of their sum by the chosen scores, and by the rejected ones)."""


def check_pairwise_loss(loss: Any) -> None:
    """Raise AssertionError with every property of a pairwise loss that `loss` lacks.

    loss: what is registered (a frozen dataclass, or a function), or an object made of it with other options.

    component: it can be registered.
    hash: equal options are equal.
    output: a LossOutput, one value a pair. dtype: float32. metrics: arrays of the same shape, finite.
    repeatable: called again, it gives the same. jit: it compiles, to the same values.
    finite value, finite gradient: also at scores of ±1e4, at equal ones, of one pair.
    pairs: a pair's value and gradient do not depend on the others, their order, or NaN in them.
    direction: at equal scores a step downhill raises the chosen one and lowers the rejected one.
    """
    found = Findings("pairwise loss", loss)
    loss = made(found, PAIRWISE_LOSS, loss)
    hashes(found, loss)
    base = _pairs(CHOSEN, REJECTED, MARGIN)
    with found.property("output"):
        require_output(loss(base), base.chosen.shape, "pair")
    found.stop_if_broken()
    _outputs(found, loss, base)
    run = _program(found, loss, base)
    zero, far = np.zeros(6), np.array([1.0, -1.0, 1.0, 0.0, -1.0, 0.0]) * EXTREME
    cases = {
        "ordinary values": base,
        f"scores of ±{EXTREME:g}": _pairs(far, far[::-1], zero),
        "equal scores": _pairs(zero, zero, zero),
        "one pair": _pairs([0.3], [0.1], [0.0]),
    }
    for name, inputs in cases.items():
        value, *slopes = run(inputs)
        with found.property("finite value"):
            require_finite(value, name)
        with found.property("finite gradient"):
            require_finite(np.stack(slopes), name)
    with found.property("pairs"):
        _independent(run, base)
    with found.property("direction"):
        _, of_chosen, of_rejected = run(cases["equal scores"])
        if not (of_chosen < 0).all() or not (of_rejected > 0).all():
            raise Broken(
                f"at equal scores the gradient is {of_chosen[0]:.3g} by the chosen score and {of_rejected[0]:.3g} by "
                "the rejected one; losses are minimised, so the first must be negative and the second positive"
            )
    found.end()


def _program(found: Findings, loss: Any, base: PairInputs) -> Measured:
    """The loss with its gradients, compiled: the property `jit`."""

    def measure(pairs: PairInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        def total(chosen: jax.Array, rejected: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = loss(pairs._replace(chosen=chosen, rejected=rejected))
            return out.loss.sum(), out.loss

        slopes, value = jax.grad(total, argnums=(0, 1), has_aux=True)(pairs.chosen, pairs.rejected)
        return value, *slopes

    compiled = jax.jit(measure)
    with found.property("jit"):
        require_close(compiled(base)[0], loss(base).loss, "under jax.jit")
    if "jit" in found.failures:
        found.stop_if_broken()

    def run(pairs: PairInputs) -> tuple[Array, Array, Array]:
        return tuple(np.asarray(x) for x in compiled(pairs))  # type: ignore[return-value]

    return run


def _pairs(chosen: Any, rejected: Any, margin: Any) -> PairInputs:
    return PairInputs(*(jnp.asarray(np.array(x), jnp.float32) for x in (chosen, rejected, margin)))


def _outputs(found: Findings, loss: Any, base: PairInputs) -> None:
    out = loss(base)
    with found.property("dtype"):
        if out.loss.dtype != jnp.float32:
            raise Broken(f"the loss is {out.loss.dtype}; return float32")
    with found.property("metrics"):
        for name, x in out.metrics.items():
            if jnp.shape(x) != base.chosen.shape:
                raise Broken(
                    f"'{name}' has shape {list(jnp.shape(x))}; give one value a pair, and leave the mean to the trainer"
                )
            require_finite(np.asarray(x, np.float32), f"'{name}'")
    with found.property("repeatable"):
        require_close(loss(base).loss, out.loss, "called again with the same inputs", rtol=0.0)


def _independent(run: Measured, base: PairInputs) -> None:
    whole = run(base)
    parts = ("value", "gradient by the chosen score", "gradient by the rejected score")
    for rows in ([5, 3, 1, 0, 2, 4], [2]):
        taken = run(PairInputs(*(x[np.array(rows)] for x in base)))
        for what, x, y in zip(parts, taken, whole, strict=True):
            require_close(x, y[rows], f"of pairs {rows} alone, {what}")
    poisoned = run(PairInputs(*(x.at[0].set(jnp.nan) for x in base)))
    for what, x, y in zip(parts, poisoned, whole, strict=True):
        require_close(x[1:], y[1:], f"with NaN in another pair, {what}")
