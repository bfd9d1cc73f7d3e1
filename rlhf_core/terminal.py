"""Standard output, as wide as whoever reads it wants it."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich.console import Console, RenderableType

WIDTH = 120
"""Columns, where the output is no terminal and COLUMNS does not say."""


def show(renderable: RenderableType) -> None:
    """Print it in the width of the terminal; elsewhere in that of COLUMNS, and without spaces at the end of lines."""
    watched = sys.stdout.isatty()
    width = None if watched or os.environ.get("COLUMNS", "").isdigit() else WIDTH
    console = Console(markup=False, highlight=False, width=width)
    if watched:
        console.print(renderable)
        return
    with console.capture() as printed:
        console.print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))


def listed(title: str, lines: Sequence[str]) -> str:
    """The lines below a title, indented; wrapped where a terminal would break them in the middle of a word."""
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        lines = [
            textwrap.fill(
                line,
                columns - 2,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            ).replace("\n", "\n  ")
            for line in lines
        ]
    return "\n  ".join([title, *lines])
