"""The options of a component, with their types, as its signature says."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from typing import Any

from pydantic import PydanticUserError, create_model

from rlhf_core.contracts import Kind
from rlhf_core.errors import InputError
from rlhf_core.options import Options


def parameters(kind: Kind[Any], thing: Any, what: str) -> list[inspect.Parameter]:
    """The parameters that are options: all of what makes a component; of a component, those with defaults."""
    try:
        signature = inspect.signature(thing)
    except ValueError as error:
        raise InputError(f"{what}: its parameters cannot be read: {error}") from None
    makes = kind.factory or inspect.isclass(thing)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [p for p in signature.parameters.values() if p.kind in by_keyword]
    if makes:
        return found
    return [p for p in found if p.default is not p.empty and p.name not in kind.arguments]


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
    """The type of an option; without an annotation, that of its default."""
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
    # One option at a time: those of the call may name types that only a type checker imports.
    holder = types.new_class("Holder", exec_body=lambda body: body.update(__annotations__={name: annotation}))
    return typing.get_type_hints(holder, globalns=scope, include_extras=True)[name]
