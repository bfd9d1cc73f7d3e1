"""What packages of others rely on, as text: names, parameters and fields.

    python tests/shared/public_surface.py

writes public_surface.txt anew, after a change that CONTRIBUTING.md, "Compatibility", allows.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rlhf_core
from rlhf_core import models
from rlhf_core.contracts import Kind
from rlhf_core.plugins import hooks

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".txt")
MODULES = (
    "artifacts data fit logprobs mesh metrics models objective optimizers packing rollouts sampling "
    "runs scoring state step training testing"
)
PUBLIC = ("rlhf_core", *(f"rlhf_core.{name}" for name in MODULES.split()))
"""Modules of core all of whose `__all__` is promised; nothing else of core is."""
PLUGINS = (
    "rlhf_sft",
    "rlhf_reward",
    "rlhf_grpo",
    "rlhf_dpo",
    "rlhf_kto",
    "rlhf_distill",
    "rlhf_rewards",
    "rlhf_remote",
)
TRAINERS = PLUGINS[:5]
REPORT = (
    "__init__",
    "charts",
    "diagram",
    "run_reader",
    "samples",
    "summary",
    "weights",
)
"""What reads and draws runs; the profile of a dataset reads it as a pipeline does."""
AUTHORS = (
    *(f"plugins/*/{name}/*.py" for name in TRAINERS),
    "examples/plugins/*/*.py",
    "plugins/testing/rlhf_testing/templates/*/component.py.txt",
    *(f"plugins/report/rlhf_report/{name}.py" for name in REPORT),
)
"""Written by authors of trainers, of components and of what reads runs, with public names alone."""
MODEL_AUTHORS = ("plugins/families/rlhf_families/*.py", "plugins/kernels/rlhf_kernels/*.py")
"""Written by authors of model families and of kernels, for whom `promised_to_model_authors` has more names."""


def surface() -> str:
    """One line a name, sorted within its module."""
    names = promised_to_model_authors()
    lines = [
        f"hook {name}{parameters(hook)}"
        for name, hook in sorted(vars(hooks).items())
        if name.startswith("rlhf_")
    ]
    for module in sorted(names):
        found = importlib.import_module(module)
        lines += ["", *(f"{module}.{line}" for name in sorted(names[module]) for line in told(found, name))]
    return "\n".join(lines) + "\n"


def promised() -> dict[str, set[str]]:
    """{module: the names that it promises}."""
    return {module: set(importlib.import_module(module).__all__) for module in (*PUBLIC, *PLUGINS)}


def promised_to_model_authors() -> dict[str, set[str]]:
    """Return what is promised to authors of model families and of kernels: {module: names}."""
    names = promised()
    names["rlhf_core.models"] |= set(f"{models.FOR_FAMILIES} {models.FOR_KERNELS}".split())
    names["rlhf_core.mesh"] |= {"mesh_of_rows", "row_axes"}
    return names


def imported(patterns: tuple[str, ...] = AUTHORS) -> Iterator[tuple[str, str]]:
    """(module of core, name) of every import in what authors write."""
    for pattern in patterns:
        for file in REPOSITORY.glob(pattern):
            text = re.sub(r"{{(\w+)}}", r"\1_", file.read_text(encoding="utf-8")).replace("class_", "Class")
            yield from read(ast.parse(text))


def read(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module of core, name) of imports, and of what is read from an imported module: `data.encode_texts`."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "rlhf_core":
            for alias in node.names:
                yield str(node.module), alias.name
                module = f"{node.module}.{alias.name}"
                if node.module == "rlhf_core" and find_spec(module) is not None:
                    modules[alias.name] = module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def told(module: Any, name: str) -> Iterator[str]:
    """A name with what may not change about it."""
    try:
        thing = getattr(module, name)
    except AttributeError:  # a module that nothing imported yet
        thing = importlib.import_module(f"{module.__name__}.{name}")
    if inspect.ismodule(thing):
        yield f"{name}: module"
    elif isinstance(thing, Kind):
        yield f"{name}: {thing}"
    elif inspect.isclass(thing):
        yield f"{name}{fields(thing)}"
        for method in sorted(members(thing)):
            if not method.startswith("_") and callable(getattr(thing, method)) and method not in shown(thing):
                yield f"{name}.{method}{parameters(getattr(thing, method))}"
    elif callable(thing) and not str(type(thing)).startswith("<class 'typing"):
        yield f"{name}{parameters(thing)}"
    else:
        yield name


def members(thing: Any) -> dict[str, Any]:
    """The attributes of a class, and those of the classes of its own package that it extends, unless promised, too."""
    package = thing.__module__.split(".")[:2]
    parts = [base for base in reversed(thing.__mro__) if base.__module__.split(".")[:2] == package]
    own = [part for part in parts if part is thing or part.__name__ not in rlhf_core.__all__]
    return {name: value for part in own for name, value in vars(part).items()}


def shown(thing: Any) -> list[str]:
    """The fields of a dataclass, a named tuple or a configuration."""
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    return list(getattr(thing, "_fields", None) or getattr(thing, "model_fields", ()))


def fields(thing: Any) -> str:
    if shown(thing):
        return f"({', '.join(shown(thing))})"
    return "" if thing.__init__ is object.__init__ or issubclass(thing, BaseException) else parameters(thing)


def parameters(function: Any) -> str:
    """`(a, *, b=1)`: names, kinds and simple defaults, without types."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(…)"
    plain = [
        p.replace(
            annotation=p.empty,
            default=p.default if simple(p.default) or p.default is p.empty else Ellipsis,
        )
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def simple(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None) or value == ()


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
