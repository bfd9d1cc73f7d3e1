"""A pipeline file's plan and forecast, as `rlhf check` makes them: the one place of the tests that knows how."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlhf_core.pipeline import identified_stages, plan, read, stage_forecasts
from rlhf_core.runtime.machine import Planned, planning_for

__all__ = ["file_of", "forecast_of", "identified_of", "plan_of", "planned_for"]


def planned_for(platform: str, devices: int, memory: int = 10**9) -> AbstractContextManager[None]:
    """Plan for devices that are not here, as `rlhf check --on` does. memory: of each, in bytes."""
    return planning_for(Planned(platform, devices, memory))


def file_of(file: str | Path, **options: Any) -> Any:
    """Read a pipeline file, with what is wrong in it. options: as of `read`."""
    return read(Path(file), **options)


def plan_of(file: str | Path, host: Any, **options: Any) -> Any:
    """Plan a pipeline. options: as of `read`. Raises InputError."""
    return plan(read(Path(file), **options), host)


def forecast_of(file: str | Path, host: Any, **options: Any) -> dict[str, Any]:
    """Forecast every stage of a pipeline, by its name. Raises InputError."""
    return dict(stage_forecasts(plan_of(file, host, **options), host))


def identified_of(file: str | Path, host: Any) -> Any:
    """Return what each stage of a pipeline would compute, as a run compares it with what is on disk."""
    return identified_stages(plan_of(file, host), host)
