"""Callbacks of trainers called from Python: any object with methods named like hooks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_dpo import DPOConfig, DPOTrainer
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_reward import RewardConfig, RewardTrainer
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import hookimpl, plugins
from rlhf_core.errors import InputError, RunError
from rlhf_core.loggers.callbacks import listen
from rlhf_core.stage import alone


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


class Raises:
    def rlhf_step_end(self, step: int) -> None:
        raise ZeroDivisionError("mine")


class Unknown:
    def rlhf_step_ended(self, step: int) -> None: ...


class OfTrl:
    def on_log(self, args: Any, state: Any, control: Any) -> None: ...


class WrongArgument:
    def rlhf_step_end(self, loss: float) -> None: ...


def test_all_methods_are_called_as_a_logger_s(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "make_mesh", tiny.one_device)  # its programs take less time to compile
    plain, decorated = Plain(), Decorated()
    config = SFTConfig(
        max_training_steps=2, total_batch_size=2, log_steps=1, save_directory=str(tmp_path / "sft")
    )
    inputs = {"model": tiny.make_model(), "train_dataset": tiny.texts(4)}
    result = SFTTrainer(config, **inputs, callbacks=[plain, decorated]).train()
    assert plain.seen == ["sft", 1, 2, "model", None]
    assert decorated.metrics["loss"] == result.metrics["loss"]
    with pytest.raises(RunError, match=r"logger 'Raises' \(callbacks\[0\]\) raised ZeroDivisionError: mine"):
        SFTTrainer(config.replace(save_directory=str(tmp_path / "b")), **inputs, callbacks=[Raises()]).train()


@pytest.mark.parametrize(
    ("trainer", "config"),
    [
        (SFTTrainer, SFTConfig),
        (RewardTrainer, RewardConfig),
        (DPOTrainer, DPOConfig),
        (GRPOTrainer, GRPOConfig),
    ],
)
def test_all_four_trainers_accept_callbacks(trainer: Any, config: Any) -> None:
    callback = Plain()
    assert trainer(config(), callbacks=[callback]).inputs["callbacks"] == [callback]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Plain], r"callbacks\[0\]: Plain is a class; give an instance"),
        (
            [Decorated(), Unknown()],
            r"callbacks\[1\]: no event is called rlhf_step_ended. Did you mean 'rlhf_step_end'",
        ),
        ([OfTrl()], r"callbacks\[0\]: OfTrl has none of the event methods: rlhf_stage_start"),
        ([WrongArgument()], r"callbacks\[0\]: .*loss"),
        (Plain(), "callbacks: expected a list of objects, got Plain"),
        ([CALLED_TWICE := Decorated(), CALLED_TWICE], r"callbacks\[1\]: the same object is given twice"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        listen(plugins.load(), callbacks)


def test_reward_functions_by_trl_s_name() -> None:
    def mine(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    assert GRPOTrainer(GRPOConfig(), reward_funcs=mine).inputs["rewards"] == [mine]
    assert GRPOTrainer(GRPOConfig(), reward_funcs=[mine, "length"]).inputs["rewards"] == [mine, "length"]
    with pytest.raises(InputError, match="reward_funcs: rewards is given twice"):
        GRPOTrainer(GRPOConfig(), reward_funcs=[mine], rewards=[mine])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model_name_or_path",
            "model_name_or_path: unknown argument of the trainer of GRPOConfig; write model",
        ),
        ("batch_size", r"it is a field of the config: GRPOConfig\(total_batch_size=…\)"),
        ("peft_config", r"it is a field of the config: GRPOConfig\(peft_config=…\)"),
        ("modle", r"Did you mean 'model'\? Arguments: config, model, "),
    ],
)
def test_other_arguments_are_answered_with_ours(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GRPOTrainer(GRPOConfig(), **{name: "x"})
