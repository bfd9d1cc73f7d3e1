"""Declare `rlhf new`; what it needs is imported when it runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def new(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="(KIND NAME)...",
            show_default=False,
            help="Kinds are policy-loss, pairwise-loss, advantage, reward, environment, trainer, sampling-trainer and "
            "logger; a name is such as my-loss, and the first is the package's, too.",
        ),
    ],
    dir: Annotated[
        Path | None, typer.Option("--dir", help="A new directory; default: rlhf-NAME here.")
    ] = None,
) -> None:
    """Write a package for components of your own. It installs and passes its tests; change it from there."""
    from rlhf_core import plugins
    from rlhf_core.errors import InputError
    from rlhf_core.runtime.terminal import echo
    from rlhf_testing.new import write

    if len(words) % 2:
        raise InputError(f"rlhf new: '{words[-1]}' has no name after it: write KIND NAME for each component")
    written = write(list(zip(words[::2], words[1::2], strict=True)), dir, plugins.load().registry)
    places = "\n".join(
        f"{written.directory}: {what} is in {file}" for what, file in written.components.items()
    )
    echo(
        f"{places}\n"
        f"next: pip install -e {shlex.quote(f'{written.directory}[test]')}; "
        f"python -m pytest {shlex.quote(str(written.directory))}; rlhf plugins"
    )
