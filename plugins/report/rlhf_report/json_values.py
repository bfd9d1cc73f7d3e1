"""Convert values from possibly damaged files to the types that the report needs, or drop them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
"""Charts use float32: larger numbers count as not finite."""


def number(value: Any) -> float | None:
    """Return a finite float; None for everything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None  # False for NaN


def numbers(value: Any, count: int | None = None) -> list[float] | None:
    """Return a list of finite floats, of length `count` if given; None for everything else."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        return None
    floats = [number(item) for item in value]
    return None if any(x is None for x in floats) else [x for x in floats if x is not None]


def table(value: Any) -> dict[str, Any]:
    """Return a table with text keys; empty for everything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def text(value: Any) -> str:
    """Return a text; empty for everything else."""
    return value if isinstance(value, str) else ""
