"""Pipelines planned, forecast and run as the commands do, and records of stages that are changed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core import plugins
from rlhf_core.pipeline import Plan, Results, plan, read, run, stage_forecasts
from rlhf_core.runtime.files import seal, unseal


def planned(
    path: Path | str, *sets: str, dir: str | None = "runs/a", objects: Any = ()
) -> tuple[Plan, plugins.Host]:
    """Plan a pipeline file; objects: plugins."""
    host = plugins.load(objects=objects)
    return plan(read(path, sets=sets, dir=dir), host), host


def forecasts(path: Path | str, *sets: str, dir: str = "runs/a", objects: Any = ()) -> Any:
    """Return {stage: what `rlhf check` forecasts of it}."""
    return stage_forecasts(*planned(path, *sets, dir=dir, objects=objects))


def ran(path: Path | str, *sets: str, dir: str = "runs/a", objects: Any = (), **options: Any) -> Results:
    """Run a pipeline file."""
    made, host = planned(path, *sets, dir=dir, objects=objects)
    return run(made, host, **options)


def change_record(path: Path, **changes: Any) -> None:
    """Write a stage.json with other fields, and the checksum of these."""
    path.write_text(seal({**unseal(path.read_bytes()), **changes}))
