"""Write a self-contained HTML page about one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import InputError
from rlhf_core.report.run_reader import read_run
from rlhf_core.runtime.files import require_writable


def report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of one run; return its path, by default RUN/report.html.

    Raises InputError if `run` is not a run directory, or bokeh is not installed.
    """
    _require_library("report")
    from rlhf_core.report.pages import page

    require_writable(None if output is None else Path(output))
    record = read_run(run)
    path = record.dir / "report.html" if output is None else Path(output)
    write_atomic(path, page(record).encode("utf-8", "replace"))  # a text may hold half a character
    return path


def compare(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a page that overlays the curves of several runs; return its path, by default compare.html.

    Raises InputError like `report`, and for fewer than two runs.
    """
    _require_library("compare")
    if len(runs) < 2:
        raise InputError(
            f"rlhf compare: give two runs or more; for one, type: rlhf report {runs[0] if runs else 'RUN'}"
        )
    from rlhf_core.report.comparison import page

    path = Path("compare.html" if output is None else output)
    require_writable(path)
    write_atomic(path, page([read_run(run) for run in runs]).encode("utf-8", "replace"))
    return path


def _require_library(command: str) -> None:
    try:
        import bokeh  # noqa: F401
    except ImportError:
        raise InputError(f"rlhf {command}: needs bokeh; type: pip install 'rlhf-core[report]'") from None
