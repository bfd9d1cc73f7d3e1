"""Flags that commands of several distributions share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

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
