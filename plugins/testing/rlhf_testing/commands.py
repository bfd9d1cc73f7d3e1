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
            help="Kinds are policy-loss, pairwise-loss, dpo-loss, divergence, advantage, reward, environment, trainer, "
            "sampling-trainer and logger; a name is such as my-loss, and the first is the package's, too.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="texts|pairs|prompts",
            help="What a trainer trains on: texts, the default, pairs of completions, or prompts, whose completions it "
            "samples.",
        ),
    ] = None,
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
    asked = list(zip(words[::2], words[1::2], strict=True))
    written = write(asked, dir, plugins.load().registry, data=data)
    places = "\n".join(
        f"{written.directory}: {what} is in {file}" for what, file in written.components.items()
    )
    echo(
        f"{places}\n"
        f"next: pip install -e {shlex.quote(f'{written.directory}[test]')}; "
        f"python -m pytest {shlex.quote(str(written.directory))}; rlhf plugins"
    )
