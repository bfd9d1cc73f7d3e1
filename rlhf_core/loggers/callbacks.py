"""Register callbacks of a trainer called from Python, which receive the same events as loggers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import InputError, suggest
from rlhf_core.plugins import hookimpl, unknown_arguments

if TYPE_CHECKING:
    from rlhf_core.plugins import Host

EVENTS = (
    "rlhf_stage_start",
    "rlhf_step_end",
    "rlhf_samples",
    "rlhf_weights",
    "rlhf_artifact_saved",
    "rlhf_stage_end",
)


def listen(host: Host, callbacks: Sequence[Any]) -> None:
    """Register objects whose methods are named like hooks, with or without `@hookimpl`, while the host lives.

    Raises InputError for an object without such methods, an unknown hook, or an argument that the hook does not have.
    """
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks: expected a list of objects, got {type(callbacks).__name__}")
    for index, callback in enumerate(callbacks):
        at = f"callbacks[{index}]"
        for name, method in _events_of(callback, at).items():
            if host.pm.parse_hookimpl_opts(callback, name) is None:
                hookimpl(getattr(method, "__func__", method))
        try:
            host.pm.register(callback, name=f"logger '{type(callback).__name__}' ({at})")
        except ValueError as error:
            raise InputError(f"{at}: the same object is given twice") from error


def _events_of(callback: Any, at: str) -> dict[str, Any]:
    """Return {event: the method that is called for it}. at: in messages."""
    if inspect.isclass(callback):
        name = callback.__name__
        raise InputError(f"{at}: {name} is a class; give an instance, {name}(…)")
    named = {name: getattr(callback, name) for name in dir(callback) if name.startswith("rlhf_")}
    methods = {name: method for name, method in named.items() if callable(method)}
    unknown = [name for name in methods if name not in EVENTS]
    if unknown:
        raise InputError(
            f"{at}: no event is called {unknown[0]}.{suggest(unknown[0], EVENTS)} Events: {', '.join(EVENTS)}"
        )
    if not methods:
        kind = type(callback).__name__
        raise InputError(f"{at}: {kind} has none of the event methods: {', '.join(EVENTS)}")
    for name, method in methods.items():
        wrong = unknown_arguments(name, method)
        if wrong:
            raise InputError(*(f"{at}: {each}" for each in wrong))
    return methods
