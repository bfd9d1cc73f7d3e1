"""Collect every property that a component breaks, and report them together."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_core.contracts import Kind, ModelFamily, Trainer
from rlhf_core.errors import InputError, error_line
from rlhf_core.hidden import hide_named, scrub
from rlhf_core.plugins.component import make_entry, qualified_name

KITS = str(Path(__file__).parent)
LONGEST_INPUT = 160
"""Characters of an input's value in a message."""


class Broken(AssertionError):
    """Raised when a property does not hold; says what happened and what to do."""


class Findings:
    """Collect the properties of one component that were checked, and the failures."""

    def __init__(self, kind: str, thing: Any) -> None:
        self.kind, self.what = kind, component_name(thing)
        self.tried: list[str] = []
        self.failures: dict[str, str] = {}

    @contextmanager
    def property(self, name: str, inputs: Any = None) -> Iterator[None]:
        """Record any exception inside the block as a failure of this property.

        inputs: what the component was called with, a struct, mapping or rows, which the message shows.
        """
        if name not in self.tried:
            self.tried.append(name)
        try:
            yield
        except Exception as error:
            message = str(error) if isinstance(error, Broken) else error_line(error, KITS)
            given = "" if inputs is None else f"; inputs: {shown_inputs(inputs)}"
            self.failures.setdefault(name, message + given)

    def stop_if_broken(self) -> None:
        """Raise now if there are failures: further checks would depend on them."""
        if self.failures:
            self._raise("; the others were not checked")

    def end(self) -> None:
        """Raise AssertionError with every failure, if there are any."""
        if self.failures:
            self._raise("")

    def _raise(self, rest: str) -> None:
        count = f"{len(self.failures)} of the {len(self.tried)} properties checked{rest}"
        lines = "\n".join(f"  {name}: {message}" for name, message in self.failures.items())
        raise AssertionError(scrub(f"{self.kind} {self.what} breaks {count}:\n{lines}"))


def shown_inputs(inputs: Any) -> str:
    """Write inputs in one line that can be typed again, but for what is long."""
    if dataclasses.is_dataclass(inputs):
        inputs = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    elif hasattr(inputs, "_asdict"):
        inputs = inputs._asdict()
    if not isinstance(inputs, Mapping):
        return _shown_value(inputs)
    return ", ".join(f"{name}={_shown_value(value)}" for name, value in inputs.items() if not callable(value))


def _shown_value(value: Any) -> str:
    if isinstance(value, np.ndarray | jax.Array):
        value = np.round(np.asarray(value), 4).tolist()
    text = repr(value)
    return text if len(text) <= LONGEST_INPUT else f"{text[:LONGEST_INPUT]}…"


def component_name(thing: Any) -> str:
    """Name a component: an object by its class and fields, anything else by its name."""
    if isinstance(thing, str):
        return f"'{thing}'"
    if isinstance(thing, Trainer):
        return qualified_name(thing.run if thing.build is None else thing.build)
    if isinstance(thing, ModelFamily):
        return ", ".join(thing.name)
    if dataclasses.is_dataclass(thing) and not inspect.isclass(thing):
        fields = [
            f"{field.name}={hide_named(field.name, getattr(thing, field.name))!r}"
            for field in dataclasses.fields(thing)
            if field.repr
        ]
        return f"{type(thing).__qualname__}({', '.join(fields)})"
    return str(getattr(thing, "__qualname__", None) or type(thing).__qualname__)


def make_component(findings: Findings, kind: Kind[Any], thing: Any) -> Any:
    """Return `thing`, or an object of it if it is a class, and check `component`: it can be registered."""
    with findings.property("component"):
        finished = (
            inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, Trainer | ModelFamily)
        )
        registered = thing if finished or not dataclasses.is_dataclass(thing) else type(thing)
        try:
            entry = make_entry(kind, "tried", registered, "its author")
            if inspect.isclass(thing):
                thing = entry.make({})
        except InputError as error:
            raise Broken("; ".join(error.problems)) from error
    findings.stop_if_broken()
    return thing


def check_hash(findings: Findings, thing: Any) -> None:
    """Check `hash`: jit reuses the program of an equal component."""
    with findings.property("hash"):
        hash(thing)
        if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
            return
        copy = dataclasses.replace(thing)
        if copy != thing or hash(copy) != hash(thing):
            raise Broken(
                f"two {qualified_name(thing)} with the same fields are not equal, so that jit compiles for each; "
                "keep the eq of @dataclass(frozen=True), and use numbers, texts and tuples as fields"
            )


def require_close(actual: Any, expected: Any, what: str, *, rtol: float = 1e-5) -> None:
    """Raise Broken if arrays differ by more than `rtol` of the largest expected value (at least 1)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise Broken(f"{what}: the shape changes from {list(expected.shape)} to {list(actual.shape)}")
    size = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)))
    same = np.isclose(actual, expected, rtol=0.0, atol=rtol * size, equal_nan=True)
    if not same.all():
        worst = np.abs(np.where(same, 0.0, actual - expected))
        by = "to NaN or infinity" if not np.isfinite(worst).all() else f"by up to {worst.max():.3g}"
        raise Broken(f"{what}: {(~same).sum()} of {same.size} values change {by}")


def require_finite(values: Any, what: str) -> None:
    """Raise Broken if a value is not finite."""
    bad = ~np.isfinite(np.asarray(values, np.float64))
    if bad.any():
        first = np.asarray(values, np.float64)[bad][0]
        raise Broken(f"{what}: {bad.sum()} of {bad.size} values are not finite, the first is {first}")
