"""Declare `rlhf new`; what it needs is imported when it runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            show_default=False,
            help="policy-loss, pairwise-loss, advantage, reward, environment, trainer, sampling-trainer or logger.",
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Such as my-loss.")],
    dir: Annotated[
        Path | None, typer.Option("--dir", help="A new directory; default: rlhf-NAME here.")
    ] = None,
) -> None:
    """Write a package for your own component. It installs and passes its tests; change it from there."""
    from rlhf_core import plugins
    from rlhf_core.runtime.terminal import echo
    from rlhf_testing.new import KINDS, write

    written = write(kind, name, dir, plugins.load().registry)
    echo(
        f"{written.directory}: the {KINDS[written.kind].name} '{written.name}' is in {written.module}\n"
        f"next: pip install -e {shlex.quote(f'{written.directory}[test]')}; "
        f"python -m pytest {shlex.quote(str(written.directory))}; rlhf plugins"
    )
