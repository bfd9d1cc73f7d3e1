"""Write rows to a file or to standard output."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.runtime.files import write_atomic
from rlhf_core.runtime.terminal import escape_control


def write_rows(rows: Iterable[Mapping[str, Any]], output: Path | None) -> None:
    text = "".join(map(row_text, rows))
    if output is None:
        write_text(text)
        return
    write_atomic(output, text)


def row_text(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False, default=_jsonable) + "\n"


def write_text(text: str) -> None:
    """Write rows to standard output."""
    sys.stdout.write(for_reader(text))


def for_reader(text: str) -> str:
    """Escape control characters if standard output is a terminal; programs get the text unchanged."""
    return escape_control(text) if sys.stdout.isatty() else text


def number(value: Any) -> float | None:
    """Return a score, or None for what JSON lacks, such as NaN: a row that could not be scored gets null."""
    return float(value) if math.isfinite(value) else None


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
