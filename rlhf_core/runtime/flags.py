"""Flags that commands of several distributions share, and commands that take all of theirs as one object."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE.py", help="Load a plugin from a file; repeatable."),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="DIR", help="MODEL's base, if it is an adapter; default: the one it names."
    ),
]
Quantize = Annotated[
    Literal["nf4", "int8", "none"] | None,
    typer.Option(
        "--quantize",
        help="Hold the matrices of the model's layers in 4 or 8 bits, or in float32; default: as its adapters were "
        "trained.",
    ),
]


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Turn a function of a dataclass into a command whose arguments and flags are the dataclass's fields."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)
    ]

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            function(options(**values))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        command.__annotations__ = hints
        return command

    return decorate
