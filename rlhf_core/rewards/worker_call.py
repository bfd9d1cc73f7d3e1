"""Call a reward function in a worker process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerCall:
    """Call a function and return its values as plain numbers, which unpickle without any library."""

    function: Any

    def __call__(self, **arguments: Any) -> Any:
        values = self.function(**arguments)
        if inspect.isawaitable(values):
            values = asyncio.run(_awaited(values))
        if hasattr(values, "tolist"):
            return values.tolist()
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            return values
        return [value.item() if hasattr(value, "item") else value for value in values]


async def _awaited(values: Any) -> Any:
    while inspect.isawaitable(values):
        values = await values
    return values
