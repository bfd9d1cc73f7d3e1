"""Docstrings, values and tables as Markdown, for `generate.py`."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.pipeline.toml import to_value

WIDTH = 120


def paragraphs(thing: Any) -> list[str]:
    """The docstring of a thing, a line a paragraph."""
    return [joined(text) for text in (inspect.getdoc(thing) or "").split("\n\n")]


def joined(text: str) -> str:
    return " ".join(text.split())


def default(value: Any) -> str:
    """A value as a TOML file would have it."""
    if value is None:
        return "none"
    if isinstance(value, Mapping) and set(value) != {"name"}:
        return "see below"
    return f"`{to_value(value)}`"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def page(parts: Iterable[str]) -> str:
    """Paragraphs wrapped; headings, tables and blocks as they are."""
    return "\n\n".join(each if each[0] in "#|`-" else wrapped(each) for each in parts if each) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(joined(text), WIDTH, break_long_words=False, break_on_hyphens=False)
