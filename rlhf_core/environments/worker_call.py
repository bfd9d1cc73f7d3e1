"""Call a method of an environment in a worker process, which gets and returns the environment's state."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

from rlhf_core.workers import awaited, run_async
from rlhf_core.workers.pickling import dumps


def call_environment(state: bytes, method: str, arguments: tuple[Any, ...]) -> tuple[bytes, Any]:
    """Call `method` of a pickled environment: (its state afterwards, what the method returned)."""
    environment = pickle.loads(state)
    value = getattr(environment, method)(*arguments)
    if inspect.isawaitable(value):
        value = run_async(awaited(value))  # on the loop of the calls before
    return dumps(environment), value
