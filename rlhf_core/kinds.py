"""Kinds of components, and the attributes by which a component tells a trainer what to do with it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, TypeVar

from rlhf_core.errors import InputError, near

T = TypeVar("T")
ALIKE = 0.85
"""How alike two names are, of 1, where one is taken for the other misspelt."""


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of component, the key under which the registry keeps names. Kinds are open: a plugin may declare its own.

    name: what messages call it, such as "policy loss".
    arguments: the names a component is called with; a function's other keyword parameters with defaults are options.
    factory: True where the component is an object, so that a registered function is called to make it.
    constant: True where jit closes over the component, so that it must hash by value: a class must be frozen, and has
        no public class attribute beside its options and `attributes`.
    attributes: {name: its values} that a trainer reads from a component with `attribute`; the first is the default.
    """

    name: str
    arguments: tuple[str, ...] = ()
    factory: bool = False
    constant: bool = False
    attributes: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    def attribute(self, component: Any, name: str) -> str:
        """Read a declared attribute of a component: an option, a class attribute or a function's; or the default.

        Raises InputError, with the nearest one, for a value that is not declared.
        """
        values = self.attributes[name]
        value = _value(component, name, values[0])
        if isinstance(value, str) and value in values:
            return value
        raise InputError(
            f"{name} of {self.name} {_called(component)} is {value!r}; it is one of {', '.join(values)}."
            f"{near(value, values) if isinstance(value, str) else ''}".rstrip(".")
        )

    def attribute_problems(self, thing: Any, options: Collection[str]) -> Iterator[str]:
        """Yield what is wrong with the attributes of a class, function or object, whose options have these names."""
        if not (self.constant or self.attributes):
            return
        names = _constants(thing) - set(options)
        for name in sorted(names - set(self.attributes)):
            known = f"; a {self.name} has {' and '.join(self.attributes)}" if self.attributes else ""
            yield (
                f"nothing reads its attribute '{name}'{known}.{near(name, self.attributes)} A constant of its own "
                "begins with an underscore, an option is a field of the dataclass"
            )
        for name in sorted((set(options) | _state(thing)) - set(self.attributes)):
            if meant := get_close_matches(name, self.attributes, n=1, cutoff=ALIKE):
                yield f"'{name}' is nearly '{meant[0]}', which the trainer reads; write that, or choose another name"
        for name in self.attributes:
            if hasattr(_value(thing, name, ""), "__get__"):
                continue  # a property: known of an object only
            try:
                self.attribute(thing, name)
            except InputError as error:
                yield str(error)


def _value(component: Any, name: str, default: str) -> Any:
    """What a component says; of a function with options, what was chosen, else the parameter's default."""
    chosen: dict[str, Any] = {}
    while isinstance(component, partial):
        chosen = {**component.keywords, **chosen}
        component = component.func
    if name in chosen:
        return chosen[name]
    if hasattr(component, name):
        return getattr(component, name)
    if inspect.isroutine(component) or hasattr(component, "__wrapped__"):
        parameter = inspect.signature(component).parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty:
            return parameter.default
    return default


def _called(component: Any) -> str:
    while isinstance(component, partial):
        component = component.func
    return str(getattr(component, "__qualname__", None) or type(component).__qualname__)


def _constants(thing: Any) -> set[str]:
    """Public attributes of a class and its parents, or of a function, that are not methods."""
    if inspect.isroutine(thing) or hasattr(thing, "__wrapped__"):
        spaces: list[Mapping[str, Any]] = [getattr(inspect.unwrap(thing), "__dict__", {})]
    else:
        spaces = [vars(base) for base in (thing if inspect.isclass(thing) else type(thing)).__mro__]
    return {
        name
        for space in spaces
        for name, value in space.items()
        if not (name.startswith("_") or callable(value) or hasattr(value, "__get__"))
    }


def _state(thing: Any) -> set[str]:
    """Public attributes of an object that was made."""
    return set() if inspect.isclass(thing) or callable(getattr(thing, "__get__", None)) else _public(thing)


def _public(thing: Any) -> set[str]:
    return {name for name in getattr(thing, "__dict__", {}) if not name.startswith("_")}
