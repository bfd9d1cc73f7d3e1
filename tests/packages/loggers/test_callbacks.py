"""Callbacks of trainers called from Python: any object with methods named like hooks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_reward import RewardConfig, RewardTrainer
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import hookimpl


class Plain:
    """A callback without decorators, with fewer arguments than the hooks have."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def rlhf_stage_start(self, stage: Any) -> None:
        self.seen.append(stage.name)

    def rlhf_step_end(self, step: int) -> None:
        self.seen.append(step)

    def rlhf_artifact_saved(self, artifact: Any) -> None:
        self.seen.append(artifact.name)

    def rlhf_stage_end(self, error: Any) -> None:
        self.seen.append(error)


class Decorated:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @hookimpl
    def rlhf_step_end(self, metrics: dict[str, float]) -> None:
        self.metrics.update(metrics)


def test_all_methods_are_called_as_a_logger_s(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlhf_core.stage.alone.make_mesh", tiny.one_device
    )  # its programs take less time to compile
    plain, decorated = Plain(), Decorated()
    config = SFTConfig(
        max_training_steps=2, total_batch_size=2, log_steps=1, save_directory=str(tmp_path / "sft")
    )
    inputs = {"model": tiny.make_model(), "train_dataset": tiny.texts(4)}
    result = SFTTrainer(config, **inputs, callbacks=[plain, decorated]).train()
    assert plain.seen == ["sft", 1, 2, "model", None]
    assert decorated.metrics["loss"] == result.metrics["loss"]
    assert RewardTrainer(RewardConfig(), callbacks=[plain]).inputs["callbacks"] == [plain]


def test_reward_functions_by_trl_s_name() -> None:
    def mine(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    given = {"reward_funcs": [mine, "length"], "callbacks": [Plain()]}
    assert GRPOTrainer(GRPOConfig(), **given).inputs["rewards"] == [mine, "length"]
    assert GRPOTrainer(GRPOConfig(), reward_funcs=mine).inputs["rewards"] == [mine]
