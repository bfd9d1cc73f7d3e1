"""Components and their options: a dataclass's fields, or a function's keyword parameters."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import PydanticUserError, SecretStr, ValidationError, create_model

from rlhf_core.config import Options, TrainerConfig
from rlhf_core.config.options import Problem, explain, problem_lines, unknown_name
from rlhf_core.config.secrets import (
    from_environment,
    is_hidden,
    reads_environment,
    remember_all,
)
from rlhf_core.contracts import LAYER, LOGGER, MODEL, TRAINER, Kind, ModelFamily, Trainer
from rlhf_core.errors import InputError, RunError, Stopped, disk_full, error_line, suggest, suggest_file
from rlhf_core.hidden import SECRET_NAME, remember, remember_attributes
from rlhf_core.runtime.caches import at_run_end, cached


def parameters(kind: Kind[Any], thing: Any, what: str) -> list[inspect.Parameter]:
    """List the parameters that are options: all of a factory's or class's, and those of a function with defaults."""
    try:
        signature = inspect.signature(thing)
    except ValueError as error:
        raise InputError(f"{what}: its parameters cannot be read: {error}") from None
    makes = kind.factory or inspect.isclass(thing)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    options = [p for p in signature.parameters.values() if p.kind in by_keyword]
    if makes:
        return options
    return [p for p in options if p.default is not p.empty and p.name not in kind.arguments]


def option_model(thing: Any, parameter: inspect.Parameter, what: str) -> type[Options]:
    try:
        annotation = _annotation(thing, parameter)
        return create_model("Option", __base__=Options, value=(annotation, ...))
    except (NameError, TypeError, SyntaxError, PydanticUserError) as error:
        raise InputError(
            f"{what}: the type of option '{parameter.name}' cannot be read: {error}. "
            "Import it outside of TYPE_CHECKING, or use a simpler one"
        ) from None


def _annotation(thing: Any, parameter: inspect.Parameter) -> Any:
    """Resolve the type of an option; without an annotation, it is the type of its default."""
    annotation, name = parameter.annotation, parameter.name
    if annotation is parameter.empty:
        default = type(parameter.default)
        return {bool: bool, int: int | float, float: float, str: str}.get(default, Any)
    if not isinstance(annotation, str):
        return annotation
    if inspect.isclass(thing):
        home = next((base for base in thing.__mro__ if name in inspect.get_annotations(base)), thing)
        scope = vars(sys.modules[home.__module__])
    else:
        scope = inspect.unwrap(thing).__globals__
    # One option at a time: other annotations may name types that only a type checker imports.
    holder = types.new_class("Holder", exec_body=lambda body: body.update(__annotations__={name: annotation}))
    return typing.get_type_hints(holder, globalns=scope, include_extras=True)[name]


HERE = str(Path(__file__).parent)
_FINISHED: Mapping[Kind[Any], type] = {TRAINER: Trainer, MODEL: ModelFamily}


@dataclass(frozen=True)
class RegistryEntry:
    """One name of the registry.

    thing: as it was added, or what a text named.
    owner: describes the plugin that added it.
    options: {option: a model with the one field `value`}, or None for a finished object, which takes no options.
    required: options without a default.
    """

    kind: Kind[Any]
    name: str
    thing: Any
    owner: str
    options: Mapping[str, type[Options]] | None
    required: frozenset[str] = frozenset()

    @property
    def secrets(self) -> frozenset[str]:
        """Names of the options whose type is, or allows, pydantic's SecretStr."""
        return frozenset(
            name
            for name, model in (self.options or {}).items()
            if _allows(model.model_fields["value"].annotation, SecretStr)
        )

    def make(self, options: Mapping[str, Any]) -> Any:
        """Make the component. Raises InputError for options that do not fit."""
        values, problems = self._read_options(options)
        if problems:
            raise InputError(*problem_lines(problems, f"{self.kind.name} '{self.name}'"))
        return self.make_of(values)

    def check(self, options: Mapping[str, Any], also: Sequence[str] = ()) -> list[Problem]:
        """List what `make` would object to, without making what opens files (kinds with `factory` except loggers).

        also: further names that a misspelt option may mean.
        """
        values, problems = self._read_options(options, also)
        made = self.kind == LOGGER or (inspect.isclass(self.thing) and not self.kind.factory)
        if not problems and (made or self.kind.attributes):
            try:
                self.make_of(values)
            except InputError as error:
                problems += [Problem("", message) for message in error.problems]
        return problems

    def make_of(self, values: Mapping[str, Any]) -> Any:
        """Make the component of the values of its options. Raises InputError for what the component refuses."""
        component = self._call(values)
        for name in self.kind.attributes:
            self.kind.attribute(component, name)
        return component

    def _call(self, values: Mapping[str, Any]) -> Any:
        if self.options is None:
            return self.thing
        if not (self.kind.factory or inspect.isclass(self.thing)):
            return functools.partial(self.thing, **values) if values else self.thing
        try:
            made = self.thing(**values)
            remember_attributes(made)  # also those that no option sets, such as a key that it reads itself
            return made
        except ValueError as error:
            raise InputError(f"{self.kind.name} '{self.name}': {error}") from error
        except Exception as error:
            if isinstance(error, InputError | RunError | Stopped) or disk_full(error):
                raise
            raise InputError(f"{self.kind.name} '{self.name}' {error_line(error, HERE)}") from error

    def _read_options(
        self, options: Mapping[str, Any], also: Sequence[str] = ()
    ) -> tuple[dict[str, Any], list[Problem]]:
        models = self.options or {}
        secret_names = self.secrets
        values, problems = {}, []
        for name, value in options.items():
            if name not in models:
                problems.append(
                    Problem(
                        name,
                        unknown_name(name, [*models, *also], f"option for {self.kind.name} '{self.name}'"),
                    )
                )
                continue
            secret = name in secret_names or SECRET_NAME.fullmatch(name) is not None
            if secret:
                remember_all(value)
            try:
                values[name] = _hashable(_read_value(models[name], value))
            except InputError as error:
                problems += [Problem(name, message) for message in error.problems]
            except ValidationError as error:
                if secret:
                    problems.append(Problem(name, "expected text; the value is hidden, as a secret"))
                    continue
                option_problems = explain(models[name], error, {"value": value})
                problems += [
                    Problem(name + path.removeprefix("value"), text) for path, text, _ in option_problems
                ]
        problems += [
            Problem(name, "missing; it has no default") for name in sorted(self.required - set(options))
        ]
        return values, problems


def _read_value(model: type[Options], value: Any) -> Any:
    """Validate the value of an option; read `{ env = "NAME" }` from the environment unless the option takes a table.

    Raises InputError for a variable that is not set and for the text that `public_table` writes in place of a secret,
    and pydantic's ValidationError for a value that does not fit.
    """

    def validate(option: Any) -> Any:
        return model.model_validate({"value": option}).value  # type: ignore[attr-defined]  # its fields are made at run time

    if is_hidden(value):
        raise InputError('was hidden when this was written; give it again, preferably as { env = "NAME" }')
    if reads_environment(value):
        with suppress(ValidationError):
            if model.model_fields["value"].annotation is not Any:
                return validate(value)
        value = from_environment(value)
    result = validate(value)
    if isinstance(result, SecretStr):
        remember(result.get_secret_value())
    return result


def make_entry(kind: Kind[Any], name: str, thing: Any, owner: str) -> RegistryEntry:
    """Make the registry entry of a thing. Raises InputError if it cannot be a component of that kind."""
    what = f"{kind.name} '{name}' ({qualified_name(thing)})"
    if kind == LAYER:
        if not inspect.isclass(thing):
            raise InputError(f"{what}: expected a class, got {type(thing).__name__}")
        return RegistryEntry(kind, name, thing, owner, None)
    wanted = _FINISHED.get(kind)
    if wanted is not None or isinstance(thing, tuple(_FINISHED.values())):
        if wanted is None or not isinstance(thing, wanted):
            expected = f"a finished {wanted.__name__}" if wanted else "a dataclass or a function"
            raise InputError(f"{what}: expected {expected}, got {type(thing).__name__}")
        if isinstance(thing, Trainer) and not _is_config(thing.config):
            raise InputError(
                f"{what}: its config must be a class that extends TrainerConfig, got {thing.config!r}"
            )
        return RegistryEntry(kind, name, thing, owner, None)
    if inspect.isclass(thing):
        _check_class(kind, thing, what)
    elif not _is_function(thing):
        if kind.arguments and not callable(thing):
            raise InputError(f"{what}: expected a dataclass or a function, got {type(thing).__name__}")
        _check_attributes(kind, thing, _fields(thing), what)
        return RegistryEntry(kind, name, thing, owner, None)
    models, required = _options(kind, thing, what)
    _check_attributes(kind, thing, models.keys() | _fields(thing), what)
    return RegistryEntry(kind, name, thing, owner, models, required)


@cached
def _options(kind: Kind[Any], thing: Any, what: str) -> tuple[Mapping[str, type[Options]], frozenset[str]]:
    """Make {option: a model with the one field `value`}, and list the options without a default.

    Cached: making the models takes most of the time in which plugins are loaded.
    """
    models = {}
    required = set()
    for parameter in parameters(kind, thing, what):
        if parameter.name == "name" and parameter.default is parameter.empty:
            raise InputError(f"{what}: in a file 'name' names the component; rename the option")
        models[parameter.name] = option_model(thing, parameter, what)
        if parameter.default is parameter.empty:
            required.add(parameter.name)
    return types.MappingProxyType(models), frozenset(required)


def qualified_name(thing: Any) -> str:
    """Return `module.Name`, where a thing is defined, or is as a text says."""
    if isinstance(thing, str):
        return thing.replace(":", ".")
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def _is_config(config: Any) -> bool:
    return inspect.isclass(config) and issubclass(config, TrainerConfig)


def _is_function(thing: Any) -> bool:
    # A jitted function is an object that wraps one.
    return inspect.isroutine(thing) or inspect.isroutine(getattr(thing, "__wrapped__", None))


def _check_class(kind: Kind[Any], thing: type, what: str) -> None:
    if not dataclasses.is_dataclass(thing):
        if kind.factory:
            return
        raise InputError(f"{what}: a class must be a dataclass: use @dataclass(frozen=True)")
    if kind.constant and not thing.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # typeshed leaves it out
        raise InputError(f"{what}: jit closes over it, so it must be frozen: use @dataclass(frozen=True)")
    if kind.arguments and not any("__call__" in vars(base) for base in thing.__mro__):
        raise InputError(f"{what}: it has no __call__({', '.join(kind.arguments)})")


def _check_attributes(kind: Kind[Any], thing: Any, options: Collection[str], what: str) -> None:
    problems = list(kind.attribute_problems(thing, options))
    if problems:
        raise InputError(*(f"{what}: {problem}" for problem in problems))


def _fields(thing: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _allows(annotation: Any, wanted: type) -> bool:
    return annotation is wanted or any(_allows(each, wanted) for each in typing.get_args(annotation))


def load_file(path: Path) -> types.ModuleType:
    """Load a Python file that is not installed as a module; an unchanged file gives the same module again.

    A run that loads it leaves no module behind: the next one begins with its globals as the file sets them.

    Raises InputError, naming the line, if the file is missing or fails.
    """
    # Imports multiprocessing, which most commands do without.
    from rlhf_core.workers.pickling import file_module_name, load_module

    try:
        path, is_file = path.resolve(), path.resolve().is_file()
    except (OSError, ValueError):  # too long, or with a NUL byte
        is_file = False
    if not is_file:
        raise InputError(f"{path}: no such file.{suggest_file(path)}")
    source = path.read_bytes()
    name = file_module_name(path, source)
    if name in sys.modules:
        return sys.modules[name]
    try:
        module = load_module(name, path, source)
    except Exception as error:
        at = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        line = f" line {at[-1]}" if at else ""
        beside = path.with_name(f"{error.name}.py") if isinstance(error, ModuleNotFoundError) else None
        hint = (
            f". A file cannot import {beside.name} next to it: put both in one file, or in a package (`rlhf "
            "new` writes one)"
            if beside is not None and beside.is_file()
            else ""
        )
        raise InputError(f"{path}{line}: {type(error).__name__}: {error}{hint}") from error
    at_run_end(functools.partial(sys.modules.pop, name, None))
    return module


def load_function(name: str) -> Callable[..., Any]:
    """Load `module:function` or `file.py:function`. Raises InputError if there is no such function."""
    home, _, attribute = name.rpartition(":")
    if home.endswith(".py"):
        module = load_file(Path(home))
    else:
        try:
            module = importlib.import_module(home)
        except Exception as error:
            hint = f"; for a file, write {home}.py:{attribute}" if Path(f"{home}.py").is_file() else ""
            raise InputError(
                f"'{name}': cannot import {home}: {type(error).__name__}: {error}{hint}"
            ) from error
    if not hasattr(module, attribute):
        raise InputError(f"'{name}': {home} has no '{attribute}'.{suggest(attribute, vars(module))}")
    function = getattr(module, attribute)
    if not callable(function):
        raise InputError(f"'{name}': {attribute} is {type(function).__name__}, not a function")
    return function
