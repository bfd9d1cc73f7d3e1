"""Lay docstrings out for the site: their lines `name: what it is` become a list."""

import re
from typing import Any

import griffe

FIELD = re.compile(r"^(\*{0,2}[A-Za-z_][\w, ]*): ", re.MULTILINE)


class Fields(griffe.Extension):
    """Marks what is described by name, in functions and classes."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of whatever was read."""
        if obj.docstring:
            first, *rest = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join([first, *map(as_list, rest)])


def as_list(paragraph: str) -> str:
    """Return a paragraph of fields as a list of Markdown; any other as it is."""
    if not FIELD.match(paragraph):
        return paragraph
    return FIELD.sub(r"- **\1**: ", paragraph)
