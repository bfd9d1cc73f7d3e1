"""Commands in this process, which has imported everything already."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from rlhf_core import cli

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def typed(arguments: Iterable[str]) -> int:
    """Run `rlhf` as a shell does, and return its exit code.

    What it leaves changed in a process of its own is as before: the arguments, how warnings are shown, and signals,
    which a command that is over ignores.
    """
    before, shown = sys.argv, warnings.showwarning
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    sys.argv = ["rlhf", *arguments]
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv, warnings.showwarning = before, shown
        for number, handler in handlers.items():
            signal.signal(number, handler)
    raise AssertionError("the command has not ended its process")


def rlhf(*arguments: Any, typed: str = "", fails: bool = False) -> Result:
    """Run `rlhf` with these arguments and `typed` as its input, and return what it printed.

    An error is raised as in Python, or, where the command `fails`, is the result's exception.
    """
    done = CliRunner().invoke(cli.app, [*map(str, arguments)], input=typed, catch_exceptions=fails)
    assert (done.exit_code != 0) is fails, done.output
    return done
