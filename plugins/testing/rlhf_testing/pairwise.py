"""Check pairwise losses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf_core.contracts import PAIRWISE_LOSS, PairInputs
from rlhf_testing.findings import Broken, Findings, require_close
from rlhf_testing.loss import LossKind, Measured, check_loss

CHOSEN = (0.3, -1.2, 2.0, 0.1, -0.4, 0.9)
REJECTED = (0.1, 0.4, -1.0, 0.7, -0.9, 0.2)
MARGIN = (0.0, 0.5, 0.0, 0.25, 1.0, 0.0)
EXTREME = 1e4


def check_pairwise_loss(loss: Any) -> None:
    """Raise AssertionError that lists every property that the pairwise loss breaks.

    loss: the registered frozen dataclass or function, or an object of it with other options.

    component: it can be registered.
    hash: objects with equal options are equal.
    output: a LossOutput with one value per pair. dtype: float32. metrics: arrays of the same shape, finite.
    repeatable: a second call gives the same. jit: it compiles, with the same values.
    finite value, finite gradient: also at scores of ±1e4, at equal scores, for one pair.
    pairs: a pair's value and gradient do not depend on other pairs, their order, or NaN in them.
    direction: at equal scores a step downhill raises the chosen score and lowers the rejected one.
    """
    __tracebackhide__ = True
    findings = Findings("pairwise loss", loss)
    base = _pairs(CHOSEN, REJECTED, MARGIN)
    zero = np.zeros(6)
    far = np.array([1.0, -1.0, 1.0, 0.0, -1.0, 0.0]) * EXTREME
    cases = {
        "ordinary values": base,
        f"scores of ±{EXTREME:g}": _pairs(far, far[::-1], zero),
        "equal scores": _pairs(zero, zero, zero),
        "one pair": _pairs([0.3], [0.1], [0.0]),
    }
    _, run = check_loss(findings, PAIRS, loss, base, cases)
    findings.check("pairs", partial(_require_independent, run), base, smaller(base))
    equal = cases["equal scores"]
    findings.check("direction", partial(_require_direction, run), equal, smaller(equal))
    findings.end()


def smaller(inputs: PairInputs) -> Iterator[PairInputs]:
    """Yield every pair of the inputs alone, then two in a row, then three."""
    for count in (1, 2, 3):
        for start in range(len(inputs.chosen) - count + 1):
            yield PairInputs(*(x[start : start + count] for x in inputs))


PAIRS = LossKind(
    PAIRWISE_LOSS,
    "pair",
    ("chosen", "rejected"),
    split=lambda pairs: (pairs._asdict(), None),
    join=lambda arrays, _: PairInputs(**arrays),
    used=lambda pairs: jnp.ones(pairs.chosen.shape, bool),
    smaller=smaller,
)


def _pairs(chosen: Any, rejected: Any, margin: Any) -> PairInputs:
    return PairInputs(*(jnp.asarray(np.array(x), jnp.float32) for x in (chosen, rejected, margin)))


def _require_independent(run: Measured, inputs: PairInputs) -> None:
    whole = run(inputs)
    count = len(inputs.chosen)
    parts = ("value", "gradient of the chosen score", "gradient of the rejected score")
    for rows in ([*range(count)][::-1], [count // 2]):
        changed = PairInputs(*(x[np.array(rows)] for x in inputs))
        for what, x, y in zip(parts, run(changed), whole, strict=True):
            require_close(x, y[rows], f"of pairs {rows} alone, {what}", changed=changed)
    changed = PairInputs(*(x.at[0].set(jnp.nan) for x in inputs))
    for what, x, y in zip(parts, run(changed), whole, strict=True):
        require_close(x[1:], y[1:], f"with NaN in another pair, {what}", changed=changed)


def _require_direction(run: Measured, inputs: PairInputs) -> None:
    _, of_chosen, of_rejected = run(inputs)
    if not (of_chosen < 0).all() or not (of_rejected > 0).all():
        raise Broken(
            f"at equal scores the gradient is {of_chosen[0]:.3g} for the chosen score and {of_rejected[0]:.3g} for "
            "the rejected one; losses are minimised, so the first must be negative and the second positive"
        )
