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

    Raises InputError if `run` is not a run directory, or has a link to a file outside it.
    """
    from rlhf_report.run_reader import require_run

    directory = require_run(run)
    return _write([directory], directory / "report.html" if output is None else output)


def compare(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a page that overlays the curves of several runs; return its path, by default compare.html.

    Raises InputError like `report`, and for fewer than two runs.
    """
    if len(runs) < 2:
        raise InputError(
            f"rlhf compare: give two runs or more; for one, type: rlhf report {runs[0] if runs else 'RUN'}"
        )
    from rlhf_report.run_reader import require_run

    return _write([require_run(run) for run in runs], "compare.html" if output is None else output)


def _write(runs: Sequence[Path], output: str | Path) -> Path:
    from rlhf_core.artifacts import write_atomic
    from rlhf_core.runs import Damaged
    from rlhf_report.frozen import collect, frozen
    from rlhf_report.watch.places import run_id
    from rlhf_report.watch.watched import Watched

    try:
        answers = collect(Watched(runs=runs), [run_id(run.absolute()) for run in runs])
    except Damaged as error:
        raise InputError(str(error)) from None
    page = frozen(answers, " · ".join(dict.fromkeys(run.name for run in runs)))
    path = Path(output)
    write_atomic(path, page.encode("utf-8", "replace"))  # a name may hold half a character
    return path
