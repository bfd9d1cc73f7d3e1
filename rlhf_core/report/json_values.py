"""Values of files that anything may have happened to: as the report needs them, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
"""Charts hold float32: a larger number counts as not finite."""


def number(value: Any) -> float | None:
    """A finite float; None for everything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST else None  # not so for NaN


def numbers(value: Any, count: int | None = None) -> list[float] | None:
    """A list of finite floats, `count` of them where that is given; None for everything else."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        return None
    found = [number(each) for each in value]
    return None if any(each is None for each in found) else [each for each in found if each is not None]


def table(value: Any) -> dict[str, Any]:
    """A table with texts as keys; empty for everything else."""
    return {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else {}


def text(value: Any) -> str:
    """A text; empty for everything else."""
    return value if isinstance(value, str) else ""
