"""Check policy losses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf_core.contracts import POLICY_LOSS, PolicyInputs
from rlhf_core.errors import InputError
from rlhf_testing.findings import Broken, Findings, require_close
from rlhf_testing.loss import Array, LossKind, Measured, check_loss

FIELDS = ("logps", "old_logps", "advantages", "ref_logps", "entropies", "rewards")
LENGTHS = (7, 5, 1, 3)
EXTREME = 40.0
"""Nats between policy and old policy: a ratio of 2e17, whose square float32 still holds."""


def check_policy_loss(loss: Any) -> None:
    """Raise AssertionError that lists every property that the policy loss breaks.

    loss: the registered frozen dataclass or function, or an object of it with other options.

    component: it can be registered, and its attributes (`aggregation`, `importance_sampling_level`) are known.
    hash: objects with equal options are equal.
    output: a LossOutput with one value per token. dtype: float32. metrics: arrays of the same shape, finite.
    repeatable: a second call gives the same. jit: it compiles, with the same values.
    finite value, finite gradient: also at log-ratios of ±40 nats, advantages of 0, one token, an empty mask.
    mask: values outside it, even NaN, change nothing inside.
    padding: more unused tokens and rows change nothing.
    rows: a row does not depend on other rows or their order.
    packing: several sequences in one row give the same as in rows of their own.
    direction: at ratio 1 a step downhill favours tokens with a positive advantage.
    optional inputs: `ref_logps`, `entropies` and `rewards` may be None, or an InputError says that the loss needs them.
    """
    findings = Findings("policy loss", loss)
    base = example()
    loss, run = check_loss(findings, TOKENS, loss, base, cases(base))
    value, gradient = run(base)
    _layouts(findings, run, base, value, gradient)
    with findings.property("direction", base):
        _direction(run(dataclasses.replace(base, old_logps=base.logps))[1], base)
    for absent in ("ref_logps", "entropies", "rewards"):
        with findings.property("optional inputs"):
            without: dict[str, Any] = {absent: None}
            try:
                loss(dataclasses.replace(base, **without))
            except InputError:
                pass  # it says what it needs
            except Exception as error:
                raise Broken(
                    f"{absent}=None: raised {type(error).__name__}: {error}; work without it, or raise an InputError "
                    "that says which option of the trainer provides it"
                ) from error
    findings.end()


def example() -> PolicyInputs:
    """Make four sequences of up to seven tokens with a hole in the mask; float32, no special values."""
    draw = np.random.default_rng(0)
    shape = (len(LENGTHS), max(LENGTHS))
    logps = -draw.exponential(1.0, shape)
    mask = np.arange(shape[1]) < np.array(LENGTHS)[:, None]
    mask[0, 2] = False
    arrays: dict[str, Any] = {
        "logps": logps,
        "old_logps": logps + 0.3 * draw.normal(size=shape),
        "advantages": np.repeat([[1.3], [-0.7], [0.4], [-1.1]], shape[1], axis=1),
        "mask": mask,
        "ref_logps": logps + 0.2 * draw.normal(size=shape),
        "entropies": draw.exponential(1.0, shape),
        "rewards": np.repeat([[1.5], [0.2], [1.0], [0.0]], shape[1], axis=1),
    }
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return PolicyInputs(**arrays)


def cases(base: PolicyInputs) -> dict[str, PolicyInputs]:
    """Return inputs at which value and gradient must be finite: {words for messages: inputs}."""
    shape = base.logps.shape
    sign = np.where(np.indices(shape).sum(0) % 2, 1.0, -1.0).astype(np.float32)
    one = {name: x[:1, :1] for name, x in _arrays(base).items()}
    return {
        "ordinary values": base,
        f"log-ratios of ±{EXTREME:g} nats": dataclasses.replace(base, old_logps=base.logps - EXTREME * sign),
        "the policy that sampled": dataclasses.replace(base, old_logps=base.logps, ref_logps=base.logps),
        "advantages of 0": dataclasses.replace(base, advantages=jnp.zeros(shape)),
        "one token": PolicyInputs(**one),
        "an empty mask": dataclasses.replace(base, mask=jnp.zeros(shape)),
    }


def _layouts(findings: Findings, run: Measured, base: PolicyInputs, value: Array, gradient: Array) -> None:
    used = _used(base)

    def same(inputs: PolicyInputs, where: Any, expected: tuple[Array, Array], what: str) -> None:
        for name, x, y in zip(("value", "gradient"), run(inputs), expected, strict=True):
            require_close(x[where], y, f"{what}, {name}")

    whole = (value[used], gradient[used])
    with findings.property("mask"):
        for what, garbage in (("other numbers", 5.0), ("NaN", np.nan), ("infinity", np.inf)):
            # Advantages and rewards come from the trainer and are always finite.
            finite = ("advantages", "rewards") if not np.isfinite(garbage) else ()
            names = [name for name in FIELDS if name not in finite]
            arrays = _arrays(base)
            filled: dict[str, Any] = {
                n: jnp.where(base.mask != 0, arrays[n], garbage + i) for i, n in enumerate(names)
            }
            same(
                dataclasses.replace(base, **filled),
                used,
                whole,
                f"with {what} outside the mask (sum or average with inputs.sequence_sum or .sequence_mean)",
            )
    with findings.property("padding"):
        n, t = base.mask.shape
        wider = ((0, 2), (0, 3))
        padded: dict[str, Any] = {name: jnp.pad(x, wider) for name, x in _arrays(base).items()}
        inside = np.pad(used, ((0, 2), (0, 3)))
        same(PolicyInputs(**padded), inside, whole, f"with {n + 2} × {t + 3} tokens in place of {n} × {t}")
    with findings.property("rows"):
        for rows in ([3, 1, 0, 2], [0, 2]):
            taken = PolicyInputs(**{name: x[np.array(rows)] for name, x in _arrays(base).items()})
            inside = used[rows]
            expected = (value[rows][inside], gradient[rows][inside])
            same(taken, inside, expected, f"of rows {rows} (a token's loss may use its own sequence only)")
    with findings.property("packing"):
        packed, inside = _packed(base)
        same(packed, inside, whole, "with all sequences in one row (inputs.sequence_mean knows about rows)")


def _packed(base: PolicyInputs) -> tuple[PolicyInputs, Any]:
    """Pack all sequences into one row; return it and the mask of their tokens."""
    flat = {name: x.reshape(1, -1) for name, x in _arrays(base).items()}
    n, t = base.mask.shape
    sequence = jnp.repeat(jnp.arange(n, dtype=jnp.int32), t)[None]
    inputs = PolicyInputs(**flat, sequence=sequence, sequences=n)
    return inputs, _used(inputs)


def _direction(gradient: Array, base: PolicyInputs) -> None:
    along = float(-(gradient * np.asarray(base.advantages)).sum())
    if along == 0:
        raise Broken(
            "at ratio 1 the gradient of logps is 0: nothing would be learned; is logps unused, or behind a "
            "stop_gradient?"
        )
    if along < 0:
        raise Broken(
            f"at ratio 1 a step downhill makes tokens with a negative advantage more likely (−Σ gradient × advantage = "
            f"{along:.3g}); losses are minimised: return the negative"
        )


def _split(inputs: PolicyInputs) -> tuple[dict[str, Any], int]:
    packed = {} if inputs.sequence is None else {"sequence": inputs.sequence}
    return {**_arrays(inputs), **packed}, inputs.sequences


TOKENS = LossKind(
    POLICY_LOSS,
    "token",
    ("logps",),
    split=_split,
    join=lambda arrays, sequences: PolicyInputs(**arrays, sequences=sequences),
    used=lambda inputs: inputs.mask != 0,
)


def _arrays(inputs: PolicyInputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in (*FIELDS, "mask")}


def _used(inputs: PolicyInputs) -> Any:
    return np.asarray(inputs.mask) != 0
