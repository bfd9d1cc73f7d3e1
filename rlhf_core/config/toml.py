"""Read TOML of a sensible size, and write a resolved pipeline as TOML."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

MOST_PARTS = 100
"""Parts of a dotted key: reading one takes time and memory by the square of them."""
MOST_LINE = 2**20
"""Characters of a line."""
_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?:^|[{{\[,])[ \t]*(?:{_PART}[ \t]*\.[ \t]*){{{MOST_PARTS}}}")
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises TOMLDecodeError, also for a line or a key that is too long to be read."""
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > MOST_LINE:
            problem = (
                f"the line has {len(line):,} characters, and at most {MOST_LINE:,} are read: break it up"
            )
        elif _LONG_KEY.search(line):
            problem = f"a key has more than {MOST_PARTS} parts: a field is at most a few tables deep"
        else:
            continue
        raise tomllib.TOMLDecodeError(f"{problem} (at line {number})")
    return tomllib.loads(text)


def to_toml(pipeline: Mapping[str, Any]) -> str:
    """Return a pipeline table as TOML; nested tables are inline, and None, which TOML lacks, is left out."""
    lines = [_line(key, value) for key, value in pipeline.items() if key != "stage"]
    for stage in pipeline["stage"]:
        lines += ["", "[[stage]]", *(_line(key, value) for key, value in stage.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    return f"{_key(key)} = {_value(value)}"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def to_value(value: Any) -> str:
    """Return a value as TOML; a component without options is written as its name."""
    if isinstance(value, Mapping) and set(value) == {"name"}:
        return _text(str(value["name"]))
    return _value(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        inside = ", ".join(_line(str(k), v) for k, v in value.items() if v is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, int | float):
        return repr(value)  # 1e-05, inf and nan are valid TOML
    return _text(str(value))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
