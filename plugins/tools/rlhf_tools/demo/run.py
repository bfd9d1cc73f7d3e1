"""Run the demo: write its data and pipeline file, train its stages, measure what came of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_core import InputError, artifacts, run_pipeline
from rlhf_core.artifacts import write_atomic
from rlhf_tools.demo.generate import Sizes, generate, settings

HERE = Path(__file__).resolve().parent
STAGES = ("base", "rm", "policy")


def prepare(directory: Path, seed: int, shuffle_labels: bool = False, sizes: Sizes | None = None) -> Path:
    """Write data and pipeline file into `directory`, if missing; return the pipeline file.

    Raises InputError if data with other settings is there.
    """
    sizes = sizes or Sizes()
    written = directory / "data" / "data.json"
    if not written.exists():
        generate(directory / "data", seed=seed, shuffle_labels=shuffle_labels, sizes=sizes)
    elif json.loads(written.read_text()) != settings(seed, shuffle_labels, sizes):
        raise InputError(f"{written} has other settings than this run; delete {directory} to start over")
    pipeline = directory / "quickstart.toml"
    write_atomic(pipeline, (HERE / "quickstart.toml").read_bytes())
    return pipeline


def demo(
    directory: Path,
    *,
    seed: int,
    shuffle_labels: bool = False,
    sizes: Sizes | None = None,
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Run or find the pipeline in `directory` and return its figures, which `summary.json` there keeps.

    sets: changes to the pipeline file, as `rlhf run --set` takes them.
    """
    pipeline = prepare(directory, seed, shuffle_labels, sizes)
    results = run_pipeline(
        pipeline, sets=[f"seed={seed}", *sets], plugins=[HERE / "stopwatch.py"], dir=directory
    )
    made = {stage: artifacts.identity(results.stages[stage].artifacts["model"].path) for stage in STAGES}
    file = directory / "summary.json"
    if file.exists() and (summary := json.loads(file.read_text()))["artifacts"] == made:
        return {**summary, "found": True}

    from rlhf_tools.demo.measure import measure

    began = time.monotonic()
    summary = {"artifacts": made, "seed": seed, "shuffle_labels": shuffle_labels}
    summary |= measure(directory, directory / "data", seed)
    clocks = {stage: directory / stage / "wall_time.json" for stage in STAGES}
    summary["seconds"] = {stage: json.loads(clock.read_text())["seconds"] for stage, clock in clocks.items()}
    summary["seconds"]["measuring"] = round(time.monotonic() - began, 2)
    write_atomic(file, json.dumps(summary, indent=2) + "\n")
    return {**summary, "found": False}
