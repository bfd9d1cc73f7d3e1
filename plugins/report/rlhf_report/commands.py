"""Declare `rlhf report` and `rlhf compare`; what they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Page = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE.html",
        help="Default: RUN/report.html; for several runs, compare.html here.",
    ),
]


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    output: Page = None,
) -> None:
    """Write one HTML page about a run. Curves, distributions, completions, timing, configuration."""
    import rlhf_report

    _print_page(rlhf_report.report(run, output))


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Run directories.", show_default=False)
    ],
    output: Page = None,
) -> None:
    """Write one HTML page about several runs. It overlays their curves."""
    import rlhf_report

    _print_page(rlhf_report.compare(runs, output))


def _print_page(path: Path) -> None:
    from rlhf_core.runtime.terminal import echo

    echo(f"{path}: {path.stat().st_size / 1e6:.2f} MB, open it in a browser")
