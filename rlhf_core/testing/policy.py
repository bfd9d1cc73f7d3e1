"""The kit for policy losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import POLICY_LOSS, LossOutput, PolicyInputs
from rlhf_core.errors import InputError
from rlhf_core.testing.findings import (
    Broken,
    Findings,
    hashes,
    made,
    require_close,
    require_finite,
    require_output,
)

FIELDS = ("logps", "old_logps", "advantages", "ref_logps", "entropies")
LENGTHS = (7, 5, 1, 3)
EXTREME = 40.0
"""Nats between policy and old policy: a ratio of 2e17, whose square float32 still holds."""

Array = NDArray[np.float32]
Measured: TypeAlias = Callable[[PolicyInputs], tuple[Array, Array]]
"""(loss of every token, gradient of their sum by `logps`), 0 outside the mask."""


def check_policy_loss(loss: Any) -> None:
    """Raise AssertionError with every property of a policy loss that `loss` lacks.

    loss: what is registered (a frozen dataclass, or a function), or an object made of it with other options.

    component: it can be registered, and its attributes (`aggregation`, `importance_sampling_level`) are known.
    hash: equal options are equal.
    output: a LossOutput, one value a token. dtype: float32. metrics: arrays of the same shape, finite.
    repeatable: called again, it gives the same. jit: it compiles, to the same values.
    finite value, finite gradient: also at a log-ratio of ±40 nats, without advantages, of one token, of an empty mask.
    mask: what is outside of it changes nothing inside, be it NaN.
    padding: nor do more unused tokens and rows.
    rows: nor do the other rows, and their order.
    packing: several sequences in a row are as many rows.
    direction: at ratio 1 a step downhill favours tokens with a positive advantage.
    optional inputs: `ref_logps` and `entropies` may be None, or an InputError says that it needs them.
    """
    found = Findings("policy loss", loss)
    loss = made(found, POLICY_LOSS, loss)
    with found.property("component"):
        for name in POLICY_LOSS.attributes:
            POLICY_LOSS.attribute(loss, name)
    hashes(found, loss)
    base = example()
    with found.property("output"):
        require_output(loss(base), base.mask.shape, "token")
    found.stop_if_broken()
    _outputs(found, loss, base)
    run = _program(found, loss, base)
    value, gradient = run(base)
    for name, inputs in cases(base).items():
        at, slope = run(inputs)
        with found.property("finite value"):
            require_finite(at[_used(inputs)], name)
        with found.property("finite gradient"):
            require_finite(slope[_used(inputs)], name)
    _layouts(found, run, base, value, gradient)
    with found.property("direction"):
        _direction(run(dataclasses.replace(base, old_logps=base.logps))[1], base)
    for absent in ("ref_logps", "entropies"):
        with found.property("optional inputs"):
            without: dict[str, Any] = {absent: None}
            try:
                loss(dataclasses.replace(base, **without))
            except InputError:
                pass  # it says what it needs
            except Exception as error:
                raise Broken(
                    f"{absent}=None: raised {type(error).__name__}: {error}; do without it, or raise an InputError "
                    "that says which option of the trainer provides it"
                ) from error
    found.end()


def example() -> PolicyInputs:
    """Four sequences of up to seven tokens with a hole; float32, and nothing special about any number."""
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
    }
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return PolicyInputs(**arrays)


def cases(base: PolicyInputs) -> dict[str, PolicyInputs]:
    """Inputs at which value and gradient must be finite, by what messages call them."""
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


def _program(found: Findings, loss: Any, base: PolicyInputs) -> Measured:
    """The loss with its gradient, compiled: the property `jit`."""

    def measure(arrays: Mapping[str, Any], sequences: int) -> tuple[jax.Array, jax.Array]:
        def total(logps: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = loss(PolicyInputs(**{**arrays, "logps": logps}, sequences=sequences))
            return jnp.where(arrays["mask"] != 0, out.loss, 0.0).sum(), out.loss

        gradient, value = jax.grad(total, has_aux=True)(arrays["logps"])
        return value, gradient

    compiled = jax.jit(measure, static_argnums=1)
    with found.property("jit"):
        require_close(compiled(_arrays(base), 1)[0], loss(base).loss, "under jax.jit")
    if "jit" in found.failures:
        found.stop_if_broken()

    def run(inputs: PolicyInputs) -> tuple[Array, Array]:
        arrays = _arrays(inputs) | ({} if inputs.sequence is None else {"sequence": inputs.sequence})
        value, gradient = compiled(arrays, inputs.sequences)
        return tuple(np.where(_used(inputs), x, 0) for x in (value, gradient))  # type: ignore[return-value]

    return run


def _outputs(found: Findings, loss: Any, base: PolicyInputs) -> None:
    out: LossOutput = loss(base)
    with found.property("dtype"):
        if out.loss.dtype != jnp.float32:
            raise Broken(f"the loss is {out.loss.dtype}; return float32")
    with found.property("metrics"):
        metrics: Mapping[str, Any] = out.metrics
        for name, x in metrics.items():
            if jnp.shape(x) != base.mask.shape:
                raise Broken(
                    f"'{name}' has shape {list(jnp.shape(x))}; give one value a token, {list(base.mask.shape)}, and "
                    "leave the mean to the trainer"
                )
            require_finite(np.asarray(x, np.float32)[_used(base)], f"'{name}'")
    with found.property("repeatable"):
        require_close(loss(base).loss, out.loss, "called again with the same inputs", rtol=0.0)


def _layouts(found: Findings, run: Measured, base: PolicyInputs, value: Array, gradient: Array) -> None:
    used = _used(base)

    def same(inputs: PolicyInputs, where: Any, expected: tuple[Array, Array], what: str) -> None:
        for name, x, y in zip(("value", "gradient"), run(inputs), expected, strict=True):
            require_close(x[where], y, f"{what}, {name}")

    whole = (value[used], gradient[used])
    with found.property("mask"):
        for what, garbage in (("other numbers", 5.0), ("NaN", np.nan), ("infinity", np.inf)):
            # An advantage is the trainer's own and always a number.
            names = [name for name in FIELDS if name != "advantages" or np.isfinite(garbage)]
            arrays = _arrays(base)
            filled: dict[str, Any] = {
                n: jnp.where(base.mask != 0, arrays[n], garbage + i) for i, n in enumerate(names)
            }
            same(
                dataclasses.replace(base, **filled),
                used,
                whole,
                f"with {what} outside the mask (a sum or mean over it is inputs.sequence_sum or .sequence_mean)",
            )
    with found.property("padding"):
        n, t = base.mask.shape
        wider = ((0, 2), (0, 3))
        padded: dict[str, Any] = {name: jnp.pad(x, wider) for name, x in _arrays(base).items()}
        inside = np.pad(used, ((0, 2), (0, 3)))
        same(PolicyInputs(**padded), inside, whole, f"with {n + 2} × {t + 3} tokens in place of {n} × {t}")
    with found.property("rows"):
        for rows in ([3, 1, 0, 2], [0, 2]):
            taken = PolicyInputs(**{name: x[np.array(rows)] for name, x in _arrays(base).items()})
            inside = used[rows]
            expected = (value[rows][inside], gradient[rows][inside])
            same(taken, inside, expected, f"of rows {rows} (a token's loss is of its own sequence alone)")
    with found.property("packing"):
        packed, inside = _packed(base)
        same(packed, inside, whole, "with all sequences in one row (inputs.sequence_mean knows about rows)")


def _packed(base: PolicyInputs) -> tuple[PolicyInputs, Any]:
    """All sequences one after another in a single row, and where their tokens are."""
    flat = {name: x.reshape(1, -1) for name, x in _arrays(base).items()}
    n, t = base.mask.shape
    sequence = jnp.repeat(jnp.arange(n, dtype=jnp.int32), t)[None]
    inputs = PolicyInputs(**flat, sequence=sequence, sequences=n)
    return inputs, _used(inputs)


def _direction(gradient: Array, base: PolicyInputs) -> None:
    along = float(-(gradient * np.asarray(base.advantages)).sum())
    if along == 0:
        raise Broken(
            "at ratio 1 the gradient by logps is 0: nothing would be learned; is logps left out, or behind a "
            "stop_gradient?"
        )
    if along < 0:
        raise Broken(
            f"at ratio 1 a step downhill makes tokens with a negative advantage likelier (−Σ gradient × advantage = "
            f"{along:.3g}); losses are minimised: return the negative"
        )


def _arrays(inputs: PolicyInputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in (*FIELDS, "mask")}


def _used(inputs: PolicyInputs) -> Any:
    return np.asarray(inputs.mask) != 0
