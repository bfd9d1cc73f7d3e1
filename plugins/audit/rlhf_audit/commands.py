"""The command `rlhf audit`. What it needs is imported when it runs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from rlhf_core.runtime.flags import Plugins


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    stage: Annotated[str | None, typer.Option("--stage", metavar="STAGE", help="Default: all.")] = None,
    replay: Annotated[
        int,
        typer.Option("--replay", metavar="N", min=0, help="Train so many updates again, from a checkpoint."),
    ] = 0,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Read sampled tokens again, with the policies that are kept."),
    ] = False,
    call: Annotated[
        bool, typer.Option("--call", help="Call rewards again that cost something, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    plugin: Plugins = None,
) -> None:
    """Check every promise of a run. From what it wrote; exit code 1 where one does not hold."""
    from rlhf_audit import auditing
    from rlhf_core.runtime.terminal import echo

    options = auditing.AuditOptions(replay, exact, call, plugin or ())
    # What a stage says while it is trained again is not part of the answer.
    with redirect_stdout(sys.stderr):
        found = auditing.audit(run, stage=stage, options=options)
    for line in [auditing.as_json(found)] if as_json else auditing.lines(found):
        echo(line)
    if auditing.failed(found):
        raise typer.Exit(1)
