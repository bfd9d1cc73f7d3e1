"""Write a resolved pipeline as TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


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
