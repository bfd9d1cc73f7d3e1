"""Callbacks: objects that a trainer run from Python calls as it calls the loggers of its config."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from rlhf_core.errors import InputError, suggest
from rlhf_core.plugins.hooks import hookimpl

if TYPE_CHECKING:
    from rlhf_core.plugins import Host

EVENTS = ("rlhf_stage_start", "rlhf_step_end", "rlhf_artifact_saved", "rlhf_stage_end")


def listen(host: Host, callbacks: Sequence[Any]) -> None:
    """Register objects with methods of the hooks' names, `@hookimpl` or not, for as long as the host lives.

    Raises InputError for anything without such a method, for an unknown hook, and for an argument that it has not.
    """
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks: a list of objects is expected, got {type(callbacks).__name__}")
    for index, each in enumerate(callbacks):
        at = f"callbacks[{index}]"
        if inspect.isclass(each):
            raise InputError(f"{at}: {each.__name__} is a class; give an object of it, {each.__name__}(…)")
        methods = [name for name in dir(each) if name.startswith("rlhf_") and callable(getattr(each, name))]
        if unknown := [name for name in methods if name not in EVENTS]:
            raise InputError(
                f"{at}: no event is called {unknown[0]}.{suggest(unknown[0], EVENTS)} Events: {', '.join(EVENTS)}"
            )
        if not methods:
            raise InputError(
                f"{at}: {type(each).__name__} has none of the methods that are called: {', '.join(EVENTS)}"
            )
        for name in methods:
            method = getattr(each, name)
            function = getattr(method, "__func__", method)
            if host.pm.parse_hookimpl_opts(each, name) is None:
                hookimpl(function)
        try:
            host.pm.register(each, name=f"logger '{type(each).__name__}' ({at})")
        except pluggy.PluginValidationError as error:
            raise InputError(f"{at}: {' '.join(str(error).split())}") from error
        except ValueError as error:
            raise InputError(f"{at}: the same object is given twice") from error
