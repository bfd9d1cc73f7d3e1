"""What a hook raises, in one line that names the plugin or logger it is of."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pluggy

from rlhf_core.components import HERE
from rlhf_core.errors import InputError, RunError, Stopped, disk_full, raised

GOES_ON = (
    "The same command goes on from the newest checkpoint, or begins the stage again where there is none."
)
FINISHED = "The stage is trained and saved: the same command goes on after it."


@contextmanager
def named(pm: pluggy.PluginManager) -> Iterator[None]:
    """Inside, an exception that is no error of ours comes out of a hook as a RunError that says whose it is."""
    undo = pm.add_hookcall_monitoring(lambda *_: None, _after)
    try:
        yield
    finally:
        undo()


def _after(
    outcome: pluggy.Result[Any], hook: str, impls: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]
) -> None:
    error = outcome.exception
    if not isinstance(error, Exception) or isinstance(error, InputError | RunError | Stopped):
        return
    impl = _raising(error, impls)
    if impl is None or disk_full(error):
        return
    said = f"stage '{arguments['stage'].name}': {_named(impl)} {raised(error, HERE)} in {hook}"
    if arguments.get("error") is None:  # else something before it has ended the stage
        said += f". {FINISHED if hook == 'rlhf_stage_end' else GOES_ON}"
    raise RunError(said) from error


def _raising(error: Exception, impls: Sequence[pluggy.HookImpl]) -> pluggy.HookImpl | None:
    """The implementation that the exception came through; of two objects of one class, the one it was called on."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = [impl for impl in impls if getattr(impl.function, "__code__", None) is frame.f_code]
        if found:
            given = list(frame.f_locals.values())
            return next((impl for impl in found if any(impl.plugin is value for value in given)), found[0])
    return None


def _named(impl: pluggy.HookImpl) -> str:
    return impl.plugin_name if impl.plugin_name.startswith("logger ") else f"plugin '{impl.plugin_name}'"
