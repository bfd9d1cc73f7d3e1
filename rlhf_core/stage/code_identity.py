"""Hashes of code: of the package that a component comes from, and of functions that are given from Python."""

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

CORE = "rlhf_core"
PLAIN = (str, bytes, int, float, complex, type(None))


def of_component(thing: Any) -> str | None:
    """Hash the Python files of the package or file that a component comes from.

    None where that is rlhf-core, whose version stands for it, or where there are no files: then `of_callable` tells.
    """
    top = _module_of(thing).partition(".")[0]
    return None if top == CORE else _of_files(top)


@functools.cache
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
        for each in files:
            content.update(each.relative_to(home.parent).as_posix().encode() + b"\0" + each.read_bytes())
    except OSError:
        return None
    return content.hexdigest()


def _module_of(thing: Any) -> str:
    """The name of the module in which a component is defined."""
    for name in ("run", "func", "__wrapped__"):  # a Trainer's function, a partial's, a jitted one's
        if (
            not inspect.isroutine(thing)
            and not inspect.isclass(thing)
            and callable(getattr(thing, name, None))
        ):
            return _module_of(getattr(thing, name))
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(named.__module__)


def of_callable(thing: Any) -> str:
    """Hash a function or an object given from Python, with what it uses of its own module, and the values it holds.

    Code of other modules counts by their names: it is another distribution's, whose version is recorded.
    """
    content = hashlib.sha256()
    _Walk(content.update).add(thing)
    return content.hexdigest()


class _Walk:
    def __init__(self, update: Callable[[bytes], None]) -> None:
        self.update = update
        self.seen: dict[
            int, Any
        ] = {}  # functions, classes and objects, kept alive so that no id is used again

    def add(self, thing: Any) -> None:
        """Hash one thing, and what it refers to."""
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
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
        for value in held:
            self.held(value, function.__module__)
        for name in sorted(_names(code)):
            if name in function.__globals__:
                self.put(name)
                self.held(function.__globals__[name], function.__module__)

    def held(self, value: Any, module: str) -> None:
        """A value that a function can see. Code of its own module is followed, that of others named; lists, tables and
        other things that a call may change do not count, since they are no longer what they were at the start.
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
    """What an object was made with: its attributes that are called like arguments of its class.

    Others, such as a count of calls, change while it is used.
    """
    try:
        names = inspect.signature(type(thing)).parameters
    except (ValueError, TypeError):
        return {}
    return {name: getattr(thing, name) for name in names if name in getattr(thing, "__dict__", {})}


def _source(thing: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # typed in a console, or built at run time
        return ""


def _names(code: types.CodeType) -> set[str]:
    """Every name that a function, and the functions in it, may look up among the globals."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*inner)


def _filled(cell: types.CellType) -> bool:
    return cell != types.CellType()  # an empty one, to which only an empty one is equal


__all__ = ["of_callable", "of_component"]
