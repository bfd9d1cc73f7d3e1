"""A kind of component: what the registry keeps under its name, and what it checks of it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, TypeVar

from rlhf_core.errors import InputError, suggest

T = TypeVar("T")
ALIKE = 0.85
"""Similarity, from 0 to 1, above which one name counts as the other one misspelt."""


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of component: the key under which the registry keeps names. Kinds are open: a plugin may declare its own.

    name: as messages write it, such as "policy loss".
    arguments: the names of the parameters that a component is called with; a function's other keyword parameters with
        defaults are options.
    factory: True where the component is an object, so that a registered function is called to make it.
    constant: True where jit closes over the component, so that it must hash by value: a class must be frozen, without
        public class attributes other than its options and `attributes`.
    attributes: {name: allowed values} that a trainer reads from a component with `attribute`; the first is the default.
    by_path: True where a name may also be `module:function` or `file.py:function`.
    """

    name: str
    arguments: tuple[str, ...] = ()
    factory: bool = False
    constant: bool = False
    attributes: Mapping[str, Sequence[str | bool]] = field(default_factory=dict, hash=False)
    by_path: bool = False

    def attribute(self, component: Any, name: str) -> Any:
        """Read a declared attribute from an option, a class or a function; return the default where it is absent.

        Raises InputError, which names the nearest declared value, for a value that is not declared.
        """
        values = self.attributes[name]
        value = _value(component, name, values[0])
        if isinstance(value, str | bool) and value in values:
            return value
        known = [str(allowed) for allowed in values]
        raise InputError(
            f"{name} of {self.name} {_called(component)} is {value!r}; it is one of {', '.join(known)}."
            f"{suggest(value, known) if isinstance(value, str) else ''}".rstrip(".")
        )

    def attribute_problems(self, thing: Any, options: Collection[str]) -> Iterator[str]:
        """Yield what is wrong with the attributes of a class, function or object with these options."""
        if not (self.constant or self.attributes):
            return
        names = _constants(thing) - set(options)
        for name in sorted(names - set(self.attributes)):
            known = f"; a {self.name} has {' and '.join(self.attributes)}" if self.attributes else ""
            yield (
                f"nothing reads its attribute '{name}'{known}.{suggest(name, self.attributes)} Start the name "
                "of a constant with an underscore; make an option a field of the dataclass"
            )
        for name in sorted((set(options) | _state(thing)) - set(self.attributes)):
            meant = get_close_matches(name, self.attributes, n=1, cutoff=ALIKE)
            if meant:
                yield f"'{name}' is nearly '{meant[0]}', which the trainer reads; write that, or choose another name"
        for name in self.attributes:
            if hasattr(_value(thing, name, ""), "__get__"):
                continue  # a property has a value on an object only
            try:
                self.attribute(thing, name)
            except InputError as error:
                yield str(error)


def _value(component: Any, name: str, default: str | bool) -> Any:
    """Read an attribute; for a function with options, the chosen value, else the parameter's default."""
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
    """List the public attributes, other than methods, of a class and its parents, or of a function."""
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
    """List the public attributes of an instance; a class or a function has none."""
    return set() if inspect.isclass(thing) or callable(getattr(thing, "__get__", None)) else _public(thing)


def _public(thing: Any) -> set[str]:
    return {name for name in getattr(thing, "__dict__", {}) if not name.startswith("_")}
