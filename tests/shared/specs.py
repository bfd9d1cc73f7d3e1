"""Specifications of stages that are made of a record, or of the arguments of a Python trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core import TrainerConfig
from rlhf_core.contracts import Trainer
from rlhf_core.stage.identity import identified
from rlhf_core.stage.spec import StageSpec

__all__ = ["given_from_python", "recorded_as"]


def _never_runs(config: TrainerConfig, stage: Any) -> None:
    raise AssertionError


def recorded_as(
    record: Mapping[str, Any], name: str = "policy", reads: str | None = None, run: Path = Path("/run")
) -> StageSpec:
    """Specify a stage of a pipeline that computes what a record says. reads: the STAGE.OUTPUT that it starts from."""
    return _spec(
        name,
        run / name,
        run,
        record["trainer"],
        record["seed"],
        TrainerConfig(),
        references={"model": (reads, run)} if reads else {},
        record=record,
    )


def given_from_python(trainer: str, config: TrainerConfig, registry: Any, **objects: Any) -> dict[str, Any]:
    """Return what a trainer from Python would compute, as it is recorded."""
    place = Path("/run")
    return dict(
        identified(_spec(trainer, place, place, trainer, 0, config, objects=objects), registry).record
    )


def _spec(
    name: str, dir: Path, run: Path, trainer: str, seed: int, config: TrainerConfig, **about: Any
) -> StageSpec:
    made = Trainer(type(config), {"model": "language_model"}, _never_runs)
    return StageSpec(name, dir, run, trainer, made, seed, config, config, config, **about)
