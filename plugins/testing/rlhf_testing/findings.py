"""Collect every property that a component breaks, and report them together, with the inputs that show it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.config import TrainerConfig
from rlhf_core.contracts import Kind, ModelFamily, Trainer
from rlhf_core.errors import InputError, error_line
from rlhf_core.hidden import hide_named, scrub
from rlhf_core.plugins.component import make_entry, qualified_name

KITS = str(Path(__file__).parent)
MANY = 32
"""Values of an array from which on only the one that is furthest off is shown."""


class Broken(AssertionError):
    """Raised when a property does not hold; says what happened and what to do.

    shown: what the message shows besides the inputs, {name: value}, such as what was found and what was expected.
    """

    def __init__(self, message: str, **shown: Any) -> None:
        super().__init__(message)
        self.shown = shown


class Findings:
    """Collect the properties of one component that were checked, and the failures.

    always: what a report with any failure shows in the end, {name: value}, such as the seed of all runs.
    """

    def __init__(self, kind: str, thing: Any) -> None:
        self.kind, self.what = kind, component_name(thing)
        self.tried: list[str] = []
        self.failures: dict[str, str] = {}
        self.always: dict[str, Any] = {}
        self._classes: dict[str, None] = {}

    @contextmanager
    def property(self, name: str, **given: Any) -> Iterator[None]:
        """Record any exception inside the block as a failure of this property.

        given: what the component was called with, which the message shows.
        """
        self._try(name)
        try:
            yield
        except Exception as error:
            self._record(name, error, given)

    def check(
        self,
        name: str,
        require: Callable[[Any], object],
        inputs: Any,
        smaller: Iterable[Any] = (),
        *,
        shown: Callable[[Any], Any] = lambda inputs: inputs,
    ) -> None:
        """Record what `require(inputs)` raises as a failure of this property, and the smallest inputs that raise it.

        smaller: other inputs, the smallest first, which are tried where `inputs` fail. shown: what the message shows
        of inputs.
        """
        self._try(name)
        error = None if name in self.failures else _raised(require, inputs)
        if error is None:
            return
        for each in smaller:
            again = _raised(require, each)
            if type(again) is type(error):
                inputs, error = each, again
                break
        self._record(name, error, {"inputs": shown(inputs)})

    def stop_if_broken(self) -> None:
        """Raise now if there are failures: further checks would depend on them."""
        __tracebackhide__ = True
        if self.failures:
            self._raise("; the others were not checked")

    def end(self) -> None:
        """Raise AssertionError with every failure, if there are any."""
        __tracebackhide__ = True
        if self.failures:
            self._raise("")

    def _try(self, name: str) -> None:
        if name not in self.tried:
            self.tried.append(name)

    def _record(self, name: str, error: Exception, given: Mapping[str, Any]) -> None:
        message = str(error) if isinstance(error, Broken) else error_line(error, KITS)
        given = {**given, **(error.shown if isinstance(error, Broken) else {})}
        lines = [message, *(f"    {each} = {self._pasted(value)}" for each, value in given.items())]
        self.failures.setdefault(name, "\n".join(lines))

    def _pasted(self, value: Any) -> str:
        if dataclasses.is_dataclass(value) or hasattr(value, "_asdict") or isinstance(value, TrainerConfig):
            home = type(value).__module__
            home = "rlhf_core" if home.startswith("rlhf_core.contracts") else home
            self._classes.setdefault(f"from {home} import {type(value).__qualname__}")
        return pasted(value)

    def _raise(self, rest: str) -> None:
        # pytest leaves out frames with this name: what a kit says stands below the author's own line.
        __tracebackhide__ = True
        count = f"{len(self.failures)} of the {len(self.tried)} properties checked{rest}"
        lines = [f"{self.kind} {self.what} breaks {count}:"]
        lines += [f"  {name}: {message}" for name, message in self.failures.items()]
        lines += [f"    {name} = {self._pasted(value)}" for name, value in self.always.items()]
        if any("array(" in line for line in lines):
            self._classes = {"from numpy import array, float32, inf, int32, nan": None, **self._classes}
        if self._classes:
            lines.append(f"To paste a line into Python, type first: {'; '.join(self._classes)}")
        raise AssertionError(scrub("\n".join(lines)))


def _raised(require: Callable[[Any], object], inputs: Any) -> Exception | None:
    try:
        require(inputs)
    except Exception as error:
        return error
    return None


def pasted(value: Any) -> str:
    """Write a value in one line of Python that makes it again."""
    if isinstance(value, np.ndarray | jax.Array):
        with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
            text = " ".join(repr(np.asarray(value)).split())
        return text.replace("[ ", "[").replace(" ,", ",").replace(" ]", "]")
    if isinstance(value, TrainerConfig):
        return _called(value, value.model_dump(exclude_unset=True), {})
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        defaults = {field.name: field.default for field in fields}
        return _called(value, {field.name: getattr(value, field.name) for field in fields}, defaults)
    if hasattr(value, "_asdict"):
        return _called(value, value._asdict(), value._field_defaults)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {pasted(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(pasted, value))}]"
    if isinstance(value, str) and len(value) > MANY:
        repeated = value[: (value + value).find(value, 1)]
        times = len(value) // len(repeated)
        return f"{repeated!r} * {times}" if times > 1 else repr(value)
    return repr(value)


def _called(value: Any, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Write the call of a class that makes a value, without the arguments that are defaults."""
    given = [
        f"{name}={pasted(each)}"
        for name, each in fields.items()
        if name not in defaults or each is not defaults[name]
    ]
    return f"{type(value).__qualname__}({', '.join(given)})"


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


def require_close(actual: Any, expected: Any, what: str, *, rtol: float = 1e-5, **shown: Any) -> None:
    """Raise Broken if arrays differ by more than `rtol` of the largest expected value (at least 1).

    shown: what a message shows before both arrays, {name: value}.
    """
    found, wanted = np.asarray(actual), np.asarray(expected)
    actual, expected = found.astype(np.float64), wanted.astype(np.float64)
    if actual.shape != expected.shape:
        raise Broken(
            f"{what}: the shape changes from {list(expected.shape)} to {list(actual.shape)}", **shown
        )
    size = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)))
    same = np.isclose(actual, expected, rtol=0.0, atol=rtol * size, equal_nan=True)
    if not same.all():
        worst = np.abs(np.where(same, 0.0, actual - expected))
        by = "to NaN or infinity" if not np.isfinite(worst).all() else f"by up to {worst.max():.3g}"
        shown |= _at(np.nan_to_num(worst, nan=np.inf), found=found, expected=wanted)
        raise Broken(f"{what}: {(~same).sum()} of {same.size} values change {by}", **shown)


def require_finite(values: Any, what: str) -> None:
    """Raise Broken if a value is not finite."""
    found = np.asarray(values)
    bad = ~np.isfinite(found.astype(np.float64))
    if bad.any():
        raise Broken(
            f"{what}: {bad.sum()} of {bad.size} values are not finite, the first is {found[bad][0]}",
            **_at(bad, found=found),
        )


def _at(off: NDArray[Any], **arrays: NDArray[Any]) -> dict[str, Any]:
    """Return arrays to show, or of many values the one that is furthest off, with its index."""
    if off.size <= MANY:
        return arrays
    at = tuple(int(i) for i in np.unravel_index(off.argmax(), off.shape))
    return {"index": at, **{name: x[at].item() for name, x in arrays.items()}}
