"""Print for a person, as wide as the terminal and with control characters escaped, or rows for a program."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rlhf_core.hidden import scrub

WIDTH = 120
"""Columns, if the output is not a terminal and COLUMNS is not set."""

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed, marks that reorder text, and surrogates, which cannot be encoded."""


def escape_control(text: str) -> str:
    """Replace control characters by their escapes, such as \\x1b: a name or completion must not drive the terminal.

    Hides secrets: all that the suite prints for a person comes through here.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], scrub(text))


def echo(text: str, *, err: bool = False) -> None:
    """Print a line of text on stdout or stderr, with control characters escaped."""
    print(escape_control(text), file=sys.stderr if err else sys.stdout, flush=True)


class SafeConsole(Console):
    """A rich console that escapes control characters in what it prints, but sends its own styles and cursor moves."""

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(escape_control(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_control(segment.text))


def show(renderable: RenderableType) -> None:
    """Print in the width of the terminal, or of COLUMNS elsewhere, where lines are stripped of trailing spaces."""
    on_terminal = sys.stdout.isatty()
    width = None if on_terminal or os.environ.get("COLUMNS", "").isdigit() else WIDTH
    console = SafeConsole(markup=False, highlight=False, width=width)
    if on_terminal:
        console.print(renderable)
        return
    with console.capture() as capture:
        console.print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def indented_list(title: str, lines: Sequence[str]) -> str:
    """Indent the lines below a title; on a terminal, wrap them between words."""
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
    return escape_control("\n  ".join([title, *lines]))


def for_reader(text: str) -> str:
    """Escape control characters if standard output is a terminal; programs get the text unchanged."""
    return escape_control(text) if sys.stdout.isatty() else text


def row_text(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False, default=_jsonable) + "\n"


def _jsonable(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def number(value: Any) -> float | None:
    """Return a score, or None for what JSON lacks, such as NaN: a row that could not be scored gets null."""
    return float(value) if math.isfinite(value) else None
