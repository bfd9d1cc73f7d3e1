"""Call a method of an environment in a worker process, which gets and returns the environment's state."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from typing import Any

from rlhf_core.workers.pickling import dumps


def call_environment(state: bytes, method: str, arguments: tuple[Any, ...]) -> tuple[bytes, Any]:
    """Call `method` of a pickled environment: (its state afterwards, what the method returned)."""
    environment = pickle.loads(state)
    value = getattr(environment, method)(*arguments)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    return dumps(environment), value


async def _awaited(value: Any) -> Any:
    while inspect.isawaitable(value):
        value = await value
    return value
