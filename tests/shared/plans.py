"""A pipeline file's plan and forecast, as `rlhf check` makes them: the one place of the tests that knows how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.pipeline import plan, read, stage_forecasts, stage_requests

__all__ = ["forecast_of", "plan_of", "requests_of"]


def plan_of(file: str | Path, host: Any, **options: Any) -> Any:
    """Plan a pipeline. options: as of `read`. Raises InputError."""
    return plan(read(Path(file), **options), host)


def forecast_of(file: str | Path, host: Any, **options: Any) -> dict[str, Any]:
    """Forecast every stage of a pipeline, by its name. Raises InputError."""
    return dict(stage_forecasts(plan_of(file, host, **options), host))


def requests_of(file: str | Path, host: Any) -> Any:
    """Return what each stage of a pipeline asks for, as a run compares it with what is on disk."""
    return stage_requests(plan_of(file, host), host)
