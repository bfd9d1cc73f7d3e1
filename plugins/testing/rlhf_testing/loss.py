"""The properties of a loss of any kind, which the kits for pairwise and policy losses check alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    used: returns the elements that count, bool.
    """

    kind: Kind[Any]
    element: str
    varied: tuple[str, ...]
    split: Callable[[Any], tuple[Mapping[str, Any], Any]]
    join: Callable[[Mapping[str, Any], Any], Any]
    used: Callable[[Any], Any]


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
    used = np.asarray(kind.used(base))
    with findings.property("output", base):
        _require_output(loss(base), used.shape, kind.element)
    findings.stop_if_broken()
    _check_outputs(findings, loss, base, used, kind.element)
    run = _program(findings, kind, loss, base)
    for name, inputs in cases.items():
        inside = np.asarray(kind.used(inputs))
        value, *slopes = run(inputs)
        with findings.property("finite value", inputs):
            require_finite(value[inside], name)
        with findings.property("finite gradient", inputs):
            require_finite(np.concatenate([slope[inside] for slope in slopes]), name)
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
    with findings.property("jit"):
        require_close(compiled(*kind.split(base))[0], loss(base).loss, "under jax.jit")
    if "jit" in findings.failures:
        findings.stop_if_broken()

    def run(inputs: Any) -> tuple[Array, ...]:
        values, gradients = compiled(*kind.split(inputs))
        each = (values, *(gradients[name] for name in kind.varied))
        return tuple(np.where(kind.used(inputs), x, 0) for x in each)

    return run


def _require_output(out: Any, shape: tuple[int, ...], element: str) -> None:
    """Raise Broken unless `out` is a LossOutput with one value per element."""
    if not isinstance(out, LossOutput):
        raise Broken(f"it returned {type(out).__name__}; return LossOutput(values, {{name: metric}})")
    if jnp.shape(out.loss) != shape:
        raise Broken(
            f"the loss has shape {list(jnp.shape(out.loss))}; return one value per {element}, {list(shape)}: the "
            "trainer masks, weights and averages"
        )
    if not isinstance(out.metrics, Mapping):
        raise Broken(f"its metrics are a {type(out.metrics).__name__}; return a dict of names and arrays")


def _check_outputs(findings: Findings, loss: Any, inputs: Any, used: Any, element: str) -> None:
    """Check `dtype`, `metrics` and `repeatable` of a loss whose output has the right shape. used: bool, same shape."""
    out = loss(inputs)
    with findings.property("dtype"):
        if out.loss.dtype != jnp.float32:
            raise Broken(f"the loss is {out.loss.dtype}; return float32")
    with findings.property("metrics"):
        for name, x in out.metrics.items():
            if jnp.shape(x) != used.shape:
                raise Broken(
                    f"'{name}' has shape {list(jnp.shape(x))}; return one value per {element}, {list(used.shape)}; "
                    "the trainer takes the mean"
                )
            require_finite(np.asarray(x, np.float32)[used], f"'{name}'")
    with findings.property("repeatable"):
        require_close(loss(inputs).loss, out.loss, "called again with the same inputs", rtol=0.0)
