"""Self-contained HTML pages about one run or several.

What reads and draws is imported when it is needed: `rlhf --help` imports this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_core import InputError

__all__ = ["compare", "report"]


def report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of one run; return its path, by default RUN/report.html.

    Raises InputError if `run` is not a run directory.
    """
    from rlhf_core.artifacts import write_atomic
    from rlhf_report.pages import page
    from rlhf_report.run_reader import read_run

    record = read_run(run)
    path = record.dir / "report.html" if output is None else Path(output)
    write_atomic(path, page(record).encode("utf-8", "replace"))  # a text may hold half a character
    return path


def compare(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a page that overlays the curves of several runs; return its path, by default compare.html.

    Raises InputError like `report`, and for fewer than two runs.
    """
    if len(runs) < 2:
        raise InputError(
            f"rlhf compare: give two runs or more; for one, type: rlhf report {runs[0] if runs else 'RUN'}"
        )
    from rlhf_core.artifacts import write_atomic
    from rlhf_report.comparison import page
    from rlhf_report.run_reader import read_run

    path = Path("compare.html" if output is None else output)
    write_atomic(path, page([read_run(run) for run in runs]).encode("utf-8", "replace"))
    return path
