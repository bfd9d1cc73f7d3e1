"""Pickle functions for another process by module, file and attribute.

Plain pickle cannot name a function of a file that is not installed, where most rewards are defined.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import operator
import pickle
import sys
import types
from pathlib import Path
from typing import Any

FILE_PREFIX = "rlhf_file_"


class UnsendableError(Exception):
    """Another process could not import the function. The text says why."""


def file_module_name(path: Path, source: bytes) -> str:
    """Name the module of a Python file that is not installed, by its path and content."""
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()
    return f"{FILE_PREFIX}{path.stem}_{digest[:8]}"


def load_module(name: str, path: Path, source: bytes) -> types.ModuleType:
    """Make a module of this source of a file. Raises ImportError, or what the source raises.

    Python's loader would take bytecode of another source, where a file of the same size was written within the second.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def dumps(function: Any) -> bytes:
    """Pickle a function, a partial of one, or an object. Raises UnsendableError if another process cannot import it."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(function)
    except UnsendableError:
        raise
    except Exception as error:  # each type refuses in its own way
        raise UnsendableError(str(error) or type(error).__name__) from error
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, type | types.FunctionType):
            return NotImplemented
        module = sys.modules.get(thing.__module__)
        file = getattr(module, "__file__", None)
        if module is None or file is None or thing.__module__ == __name__:
            return NotImplemented  # pickle itself can name those of Python and of this module
        if module.__name__ == "__main__":
            raise UnsendableError(f"{thing.__qualname__} is defined in the script that runs, {file}")
        try:
            same = operator.attrgetter(thing.__qualname__)(module) is thing
        except AttributeError:
            same = False
        if not same:
            raise UnsendableError(f"{thing.__qualname__} is not an attribute of a module")
        return load_attribute, (module.__name__, str(file), thing.__qualname__)


class ByName:
    """A reference to a function of an installed module that only the worker imports."""

    def __init__(self, module: str, attribute: str) -> None:
        self.names = module, attribute

    def __reduce__(self) -> tuple[Any, ...]:
        return import_attribute, self.names


def import_attribute(module: str, attribute: str) -> Any:
    """Import a module and return one of its attributes."""
    return getattr(importlib.import_module(module), attribute)


def load_attribute(module_name: str, file: str, attribute: str) -> Any:
    """Load a module, by name if that finds the same file, else from the file, and return one of its attributes."""
    module = (
        sys.modules.get(module_name) or _import_same_file(module_name, file) or _load_file(module_name, file)
    )
    return operator.attrgetter(attribute)(module)


def _import_same_file(module_name: str, file: str) -> types.ModuleType | None:
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != Path(file).resolve():
        return None
    return importlib.import_module(module_name)


def _load_file(module_name: str, file: str) -> types.ModuleType:
    path = Path(file)
    source = path.read_bytes()
    if module_name.startswith(FILE_PREFIX) and file_module_name(path, source) != module_name:
        raise ImportError(f"{file} changed during the run; restart the run to use the new version")
    return load_module(module_name, path, source)
