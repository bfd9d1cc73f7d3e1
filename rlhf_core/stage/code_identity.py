"""Hash code: the package that a component comes from, and functions passed from Python."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.runtime.caches import cached

CORE = "rlhf_core"
PLAIN = (str, bytes, int, float, complex, type(None))


def of_component(thing: Any) -> str | None:
    """Hash the Python files of the package or file that a component comes from.

    None for rlhf-core, which is identified by its version, and where there are no files: then use `of_callable`.
    """
    top = _module_of(thing).partition(".")[0]
    return None if top == CORE else _of_files(top)


@cached
def _of_files(top: str) -> str | None:
    """Hash the code of a top-level module: all files of a package, or the one file."""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    if module is None or not file or top == "__main__":
        return None
    home = Path(file)
    files = sorted(home.parent.rglob("*.py")) if hasattr(module, "__path__") else [home]
    content = hashlib.sha256()
    try:
        for path in files:
            content.update(path.relative_to(home.parent).as_posix().encode() + b"\0" + path.read_bytes())
    except OSError:
        return None
    return content.hexdigest()


def _module_of(thing: Any) -> str:
    """Return the name of the module that defines a component."""
    for name in ("run", "func", "__wrapped__"):  # the function of a Trainer, a partial, a jitted function
        if (
            not inspect.isroutine(thing)
            and not inspect.isclass(thing)
            and callable(getattr(thing, name, None))
        ):
            return _module_of(getattr(thing, name))
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(named.__module__)


def of_callable(thing: Any) -> str:
    """Hash a function or an object passed from Python, the code it uses from its own module, and the values it holds.

    Code of other modules counts by name only: it belongs to a distribution whose version is recorded.
    """
    content = hashlib.sha256()
    _Walk(content.update).add(thing)
    return content.hexdigest()


class _Walk:
    def __init__(self, update: Callable[[bytes], None]) -> None:
        self.update = update
        self.seen: dict[int, Any] = {}  # keeps objects alive, so that no id is reused

    def add(self, thing: Any) -> None:
        """Hash an object and what it refers to."""
        if isinstance(thing, PLAIN):
            return self.put(f"{type(thing).__name__} {thing!r}")
        self.put(type(thing).__qualname__)
        if isinstance(thing, Mapping):
            return self.add([*thing.keys(), *thing.values()])
        if isinstance(thing, list | tuple):
            for value in thing:
                self.add(value)
            return self.put("end")
        if isinstance(thing, set | frozenset):
            return self.put(" ".join(sorted(map(repr, thing))))
        if isinstance(thing, functools.partial):
            return self.add([thing.func, thing.args, thing.keywords])
        if isinstance(thing, types.MethodType):
            return self.add([thing.__func__, thing.__self__])
        if isinstance(thing, types.ModuleType | types.BuiltinFunctionType):
            return self.put(getattr(thing, "__qualname__", thing.__name__))
        if id(thing) in self.seen:
            return None
        self.seen[id(thing)] = thing
        if isinstance(thing, types.FunctionType):
            return self.function(thing)
        if isinstance(thing, type):
            return self.type(thing)
        if isinstance(getattr(thing, "__wrapped__", None), types.FunctionType):
            return self.add(thing.__wrapped__)
        if hasattr(thing, "__array__"):
            array = np.asarray(thing)
            return self.add([str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()])
        self.add(type(thing))
        return self.add(_options_of(thing))

    def function(self, function: types.FunctionType) -> None:
        code = function.__code__
        source = "" if code.co_name == "<lambda>" else _source(function)
        if source:
            self.put(source)
        else:
            self.code(code)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
        for value in values:
            self.hash_held(value, function.__module__)
        for name in sorted(_names(code)):
            if name in function.__globals__:
                self.put(name)
                self.hash_held(function.__globals__[name], function.__module__)

    def hash_held(self, value: Any, module: str) -> None:
        """Hash a value that a function can see.

        Code of the function's own module is hashed, code of others named. Lists, dictionaries and other mutable values
        do not count: a call may have changed them since the start.
        """
        home = getattr(value, "__module__", None)
        if isinstance(value, types.FunctionType | type) and home != module:
            self.put(f"{home}.{value.__qualname__}")
        elif isinstance(value, (*PLAIN, types.FunctionType, type, tuple, frozenset, functools.partial)):
            self.add(value)

    def type(self, cls: type) -> None:
        source = _source(cls)
        self.put(source or f"{cls.__module__}.{cls.__qualname__}")
        for method in vars(cls).values():
            if isinstance(method, types.FunctionType) and method.__module__ == cls.__module__:
                self.function(method)

    def code(self, code: types.CodeType) -> None:
        self.update(code.co_code)
        self.put(json.dumps([list(code.co_names), list(code.co_varnames), list(code.co_freevars)]))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant)
            else:
                self.add(constant)

    def put(self, text: str) -> None:
        self.update(text.encode("utf-8", "surrogatepass") + b"\0")


def _options_of(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object that are named like arguments of its class.

    Others, such as a count of calls, change with use.
    """
    try:
        names = inspect.signature(type(thing)).parameters
    except (ValueError, TypeError):
        return {}
    return {name: getattr(thing, name) for name in names if name in getattr(thing, "__dict__", {})}


def _source(thing: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # typed in a console, or built at runtime
        return ""


def _names(code: types.CodeType) -> set[str]:
    """Return every global name that a function, and the functions inside it, may look up."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)


def _filled(cell: types.CellType) -> bool:
    return cell != types.CellType()  # only empty cells equal an empty cell


__all__ = ["of_callable", "of_component"]
