"""Every field of every trainer's config is read by what it configures: none is taken and then forgotten."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pydantic
import pytest
from rlhf_dpo import DPOConfig, DPOTrainer, OnlineDPOConfig, OnlineDPOTrainer
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_kto import KTOConfig, KTOTrainer
from rlhf_reward import RewardConfig, RewardTrainer
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import config
from rlhf_core.config import TrainerConfig
from rlhf_core.mesh import make_mesh

CLASSES_OF: dict[str, tuple[type[TrainerConfig], Any]] = {
    "sft": (SFTConfig, SFTTrainer),
    "reward": (RewardConfig, RewardTrainer),
    "grpo": (GRPOConfig, GRPOTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer),
    "kto": (KTOConfig, KTOTrainer),
}
CLASSES = tuple(str(Path(module.__file__ or "").parent) for module in (config, pydantic))


def recording(config: type[TrainerConfig], read: set[str]) -> type[TrainerConfig]:
    """The class, with every read of a field noted, but for those of the config classes themselves."""

    class Recording(config):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            if name in config.model_fields:
                code = sys._getframe(1).f_code
                of_class = code.co_filename.startswith(CLASSES) and code.co_name != "full_name"
                if not of_class and code.co_name != "_fits":
                    read.add(name)
            return super().__getattribute__(name)

    return Recording


def everything(trainer: str, tiny: ModuleType, directory: Path) -> dict[str, Any]:
    """A config in which a field that matters only beside another has that other."""
    model = directory / "model"
    offline = {"sft": tiny.texts, "reward": tiny.pairs, "dpo": tiny.pairs, "kto": tiny.pairs}
    rows = offline.get(trainer, tiny.prompts)
    tiny.make_model("score" if trainer == "reward" else "lm").save(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    given: dict[str, Any] = {
        "model": model,
        "train_data": tiny.write_rows(directory / "train.jsonl", rows(8)),
        "eval_data": tiny.write_rows(directory / "eval.jsonl", rows(4, seed=1)),
        "max_training_steps": 3,
        "total_batch_size": 4,
        "evaluation_steps": 2,
        "early_stopping_patience": 5,
        "load_best_model_at_end": True,
        "save_directory": directory / "run",
    }
    sampled: dict[str, Any] = {
        "rewards": [{"name": "length", "target": 4}],
        "num_generations": 2,
        "sampling": {"max_completion_length": 4},
    }
    given |= sampled if trainer in ("grpo", "online_dpo") else {}
    return given | ({"sync_ref_model": True} if trainer == "grpo" else {})


@pytest.mark.parametrize(
    "trainer", [name if name == "grpo" else pytest.param(name, marks=pytest.mark.long) for name in CLASSES_OF]
)
def test_every_field_is_read(
    trainer: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    cls, made = CLASSES_OF[trainer]
    config = recording(cls, read)(**everything(trainer, tiny, tmp_path))
    read.clear()  # what validation looked at
    monkeypatch.setattr("rlhf_core.stage.alone.make_mesh", lambda: make_mesh(devices=jax.devices()[:1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made(config).train()
    unread = set(cls.model_fields) - read
    unread -= {"dataloader_num_workers", "dataset_num_proc", "shuffle_buffer"}  # of streams and large data
    unread -= {"router_bias_rate"}  # of models with experts
    ignored = set(cls.unused_fields())
    assert unread <= ignored  # which are warnings
    assert ignored - unread <= {"prompt_repeated"}  # read with the other settings of texts by every trainer
