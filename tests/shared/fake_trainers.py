"""A plugin with two trainers that take no time, for tests of pipelines: also loaded as `--plugin` file."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
from pydantic import Field

from rlhf_core import (
    PAIRWISE_LOSS,
    REWARD,
    TRAINER,
    Registry,
    Stage,
    Trainer,
    TrainerConfig,
    artifacts,
    hookimpl,
)
from rlhf_core.config import Component
from rlhf_core.contracts import LossOutput, PairInputs
from rlhf_core.errors import InputError, RunError, Stopped
from rlhf_core.training import Description, OnShapes

EVENTS: list[tuple[str, Any]] = []


class FakeConfig(TrainerConfig):
    size: int = Field(3, ge=1, description="bytes of the model")
    fail: str | None = Field(None, description="how it ends")
    loss: Annotated[Component, PAIRWISE_LOSS] = Field(Component(name="fake_loss"), description="a loss")
    rewards: list[Annotated[Component, REWARD]] = Field([], description="rewards")


@dataclass(frozen=True)
class FakeLoss:
    temperature: float = 1.0

    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(inputs.chosen)


@dataclass
class FakeModelReward:
    model: str

    def __call__(self, completions: Any) -> list[float]:
        return [0.0 for _ in completions]


@dataclass
class Weights:
    """What `artifacts.save_model` needs of a model."""

    content: str
    tokenizer: None = None

    def save(self, path: Path) -> None:
        if jax.process_index() > 0:  # the first writes, as a model's `save` does
            return
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights.txt").write_text(self.content)


def _run(kind: str) -> Any:
    def run(config: FakeConfig, stage: Stage) -> None:
        EVENTS.append(("run", stage.name))
        if config.fail == "error":
            raise RunError("the fake trainer was told to fail")
        if config.fail == "stopped":
            raise Stopped("stopped, state saved")
        if config.fail == "full":
            raise OSError(28, "No space left on device", "weights.txt")
        if config.fail == "broken disk":
            raise OSError(5, "Input/output error", "weights.txt")
        if config.fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.fail == "slow":
            time.sleep(30)
        if config.fail == "empty":
            return
        read = ""
        if isinstance(config.model, str):
            read = (Path(config.model) / "weights.txt").read_text()
        stage.hook.rlhf_step_end(stage=stage, step=1, metrics={"loss": 0.5, "size": float(config.size)})
        artifacts.save_model(stage, "model", kind, Weights(read + "x" * config.size + str(stage.seed)))  # type: ignore[arg-type]
        if config.fail == "after":
            raise RunError("the fake trainer was told to fail")

    return run


def _build(config: FakeConfig, context: Any) -> Any:
    assert isinstance(context, OnShapes)
    if config.fail == "forecast":
        raise InputError("train.jsonl row 7: no column 'text'")
    if config.fail == "full forecast":
        raise OSError(28, "No space left on device", "cache")
    if config.fail == "broken forecast":
        json.loads("{'a'")  # the place that helps is this line, not one of the library
    context.tokenizer = None  # the forecast ends with what is described
    context.trains_on(FakeSource(f"{config.size} bytes from {config.model}"))


@dataclass(frozen=True)
class FakeSource:
    line: str

    def describe(self, context: Any, models: Any) -> Description:
        return Description([self.line], 1, 1, 1)

    def held(self, context: Any, definition: Any, parameters: int) -> dict[str, int]:
        return {}


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(
        TRAINER, "fake", Trainer(FakeConfig, {"model": "language_model"}, _run("language_model"), _build)
    )
    registry.add(
        TRAINER, "fake_rm", Trainer(FakeConfig, {"model": "reward_model"}, _run("reward_model"), _build)
    )
    registry.add(PAIRWISE_LOSS, "fake_loss", FakeLoss)
    registry.add(REWARD, "fake_model", FakeModelReward)


@hookimpl
def rlhf_stage_start(stage: Stage) -> None:
    EVENTS.append(("start", stage.name))


@hookimpl
def rlhf_artifact_saved(stage: Stage, artifact: Any) -> None:
    EVENTS.append(("saved", f"{stage.name}.{artifact.name}"))


@hookimpl
def rlhf_stage_end(stage: Stage, error: BaseException | None) -> None:
    EVENTS.append(("end", None if error is None else type(error).__name__))
