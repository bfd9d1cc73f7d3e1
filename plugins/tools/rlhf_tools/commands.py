"""Declare the commands; what they need is imported when they run: `rlhf --help` imports this module."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def demo(
    seed: Annotated[int, typer.Option("--seed", help="Of the data and of all stages.")] = 0,
    shuffle_labels: Annotated[
        bool, typer.Option("--shuffle-labels", help="Prefer either reply at random: a control.")
    ] = False,
    dir: Annotated[
        Path | None,
        typer.Option("--dir", metavar="RUN", help="Run directory; default: runs/quickstart-seedSEED."),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="DIR", help="Only write the data and the pipeline file, to change and run."
        ),
    ] = None,
) -> None:
    """Train a policy from preferences, in some minutes on a CPU. The same command resumes.

    SFT on demonstrations, a reward model on pairs, GRPO against it; then a table of what changed.
    """
    from rich.console import Console

    from rlhf_core.runtime.terminal import echo
    from rlhf_tools.demo import run

    if write is not None:
        pipeline = shlex.quote(str(run.prepare(write, seed, shuffle_labels)))
        echo(f"{write}: data/ and quickstart.toml\nnext: rlhf check {pipeline}; rlhf run {pipeline}")
        return

    from rlhf_tools.demo.table import closing_table

    name = f"quickstart-seed{seed}{'-shuffled' if shuffle_labels else ''}"
    directory = dir or Path("runs") / name
    summary = run.demo(directory, seed=seed, shuffle_labels=shuffle_labels)
    Console(highlight=False).print(closing_table(summary, directory))
