"""Commands in this process, which has imported everything already."""

from __future__ import annotations

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from rlhf_core import cli


def rlhf(*arguments: Any, typed: str = "", fails: bool = False) -> Result:
    """Run `rlhf` with these arguments and `typed` as its input, and return what it printed.

    An error is raised as in Python, or, where the command `fails`, is the result's exception.
    """
    done = CliRunner().invoke(cli.app, [*map(str, arguments)], input=typed, catch_exceptions=fails)
    assert (done.exit_code != 0) is fails, done.output
    return done
