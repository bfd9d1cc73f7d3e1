"""The properties of a loss of any kind, which the kits for pairwise and policy losses check alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import Kind, LossOutput
from rlhf_testing.findings import (
    Broken,
    Findings,
    check_hash,
    make_component,
    require_close,
    require_finite,
)

Array = NDArray[np.float32]
Measured: TypeAlias = Callable[[Any], tuple[Array, ...]]
"""(loss per element, gradient of their sum with respect to each of `LossKind.varied`), 0 where it is not used."""


@dataclass(frozen=True)
class LossKind:
    """A kind of loss and how its inputs are taken apart.

    element: what has a value of its own, "pair" or "token". varied: the inputs that gradients are taken of.
    split: returns {name: array} of inputs, and what jit takes as a constant. join: makes inputs of these two.
    used: returns the elements that count, bool. smaller: yields parts of inputs, the smallest first.
    """

    kind: Kind[Any]
    element: str
    varied: tuple[str, ...]
    split: Callable[[Any], tuple[Mapping[str, Any], Any]]
    join: Callable[[Mapping[str, Any], Any], Any]
    used: Callable[[Any], Any]
    smaller: Callable[[Any], Iterator[Any]]


def check_loss(
    findings: Findings, kind: LossKind, loss: Any, base: Any, cases: Mapping[str, Any]
) -> tuple[Any, Measured]:
    """Check what holds of a loss of any kind; return it as it is called, and its compiled program with gradients.

    base: ordinary inputs. cases: inputs at which value and gradient must be finite, {words for messages: inputs}.
    """
    loss = make_component(findings, kind.kind, loss)
    with findings.property("component"):
        for name in kind.kind.attributes:
            kind.kind.attribute(loss, name)
    check_hash(findings, loss)
    for name, require in OUTPUT.items():
        findings.check(name, partial(require, kind, loss), base, kind.smaller(base))
        if name == "output":
            findings.stop_if_broken()
    run = _program(findings, kind, loss, base)
    for name, inputs in cases.items():
        for what, part in (("finite value", slice(1)), ("finite gradient", slice(1, None))):
            findings.check(
                what, partial(_require_finite, kind, run, part, name), inputs, kind.smaller(inputs)
            )
    return loss, run


def _program(findings: Findings, kind: LossKind, loss: Any, base: Any) -> Measured:
    """Compile the loss with its gradients, and check the property `jit`."""

    def measure(arrays: Mapping[str, Any], constant: Any) -> tuple[jax.Array, Any]:
        def total(varied: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
            inputs = kind.join({**arrays, **varied}, constant)
            values = loss(inputs).loss
            return jnp.where(kind.used(inputs), values, 0.0).sum(), values

        gradients, values = jax.grad(total, has_aux=True)({name: arrays[name] for name in kind.varied})
        return values, gradients

    compiled = jax.jit(measure, static_argnums=1)

    def require_equal(inputs: Any) -> None:
        require_close(compiled(*kind.split(inputs))[0], loss(inputs).loss, "under jax.jit")

    findings.check("jit", require_equal, base, kind.smaller(base))
    if "jit" in findings.failures:
        findings.stop_if_broken()

    def run(inputs: Any) -> tuple[Array, ...]:
        values, gradients = compiled(*kind.split(inputs))
        each = (values, *(gradients[name] for name in kind.varied))
        return tuple(np.where(kind.used(inputs), x, 0) for x in each)

    return run


def _require_finite(kind: LossKind, run: Measured, part: slice, what: str, inputs: Any) -> None:
    """Raise Broken unless the value, or the gradients, of the elements that count are finite."""
    inside = np.asarray(kind.used(inputs))
    require_finite(np.concatenate([x[inside] for x in run(inputs)[part]]), what)


def _require_output(kind: LossKind, loss: Any, inputs: Any) -> None:
    """Raise Broken unless the loss returns a LossOutput with one value per element."""
    out = loss(inputs)
    shape = np.shape(kind.used(inputs))
    if not isinstance(out, LossOutput):
        raise Broken(f"it returned {type(out).__name__}; return LossOutput(values, {{name: metric}})")
    if jnp.shape(out.loss) != shape:
        raise Broken(
            f"the loss has shape {list(jnp.shape(out.loss))}; return one value per {kind.element}, {list(shape)}: the "
            "trainer masks, weights and averages"
        )
    if not isinstance(out.metrics, Mapping):
        raise Broken(f"its metrics are a {type(out.metrics).__name__}; return a dict of names and arrays")


def _require_float32(kind: LossKind, loss: Any, inputs: Any) -> None:
    dtype = loss(inputs).loss.dtype
    if dtype != jnp.float32:
        raise Broken(f"the loss is {dtype}; return float32")


def _require_metrics(kind: LossKind, loss: Any, inputs: Any) -> None:
    used = np.asarray(kind.used(inputs))
    for name, x in loss(inputs).metrics.items():
        if jnp.shape(x) != used.shape:
            raise Broken(
                f"'{name}' has shape {list(jnp.shape(x))}; return one value per {kind.element}, {list(used.shape)}; "
                "the trainer takes the mean"
            )
        require_finite(np.asarray(x, np.float32)[used], f"'{name}'")


def _require_repeatable(kind: LossKind, loss: Any, inputs: Any) -> None:
    before = loss(inputs).loss
    require_close(loss(inputs).loss, before, "called again with the same inputs", rtol=0.0)


OUTPUT: Mapping[str, Callable[[LossKind, Any, Any], None]] = {
    "output": _require_output,
    "dtype": _require_float32,
    "metrics": _require_metrics,
    "repeatable": _require_repeatable,
}
"""{property: raises Broken unless it holds of (kind, loss, inputs)}, of what a loss returns."""
