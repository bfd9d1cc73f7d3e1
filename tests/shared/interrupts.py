"""Loggers that do something after an update, such as ending the run as a crash would."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core import hookimpl


class At:
    """Calls `act` after a logged update."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    @hookimpl
    def rlhf_step_end(self, step: int) -> None:
        if step == self.step:
            self.act()


def interrupt(step: int) -> At:
    """Make a logger that raises KeyboardInterrupt after an update; the update before it may be saved."""

    def ends() -> None:
        raise KeyboardInterrupt

    return At(step, ends)
