"""Arguments and flags that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", metavar="FILE.py", help="Load a plugin from a file; repeatable."),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="OUT.jsonl", help="Default: standard output.")
]
Template = Annotated[
    str | None, typer.Option("--chat_template", help='"plain" or a file; default: the tokenizer\'s.')
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="DIR", help="MODEL's base, if it is an adapter; default: the one it names."
    ),
]
