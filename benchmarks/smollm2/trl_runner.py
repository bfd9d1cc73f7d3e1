"""Train with TRL's GRPOTrainer or RewardTrainer, in an environment of its own, and print a JSON row last.

    TRL_PYTHON benchmarks/smollm2/trl_runner.py grpo DIR

DIR gets the final weights. Attention is PyTorch's `sdpa`, the optimizer its fused AdamW, and threads are as many as
there are cores.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import task
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

LOGGED = {"grpo": {"reward": "reward", "loss": "loss"}, "reward": {"loss": "loss", "accuracy": "accuracy"}}
LOADING = {"dtype": "float32", "attn_implementation": "sdpa"}


class Clock(TrainerCallback):
    """When each update was over."""

    def __init__(self) -> None:
        self.over: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.over.append(time.time())


def shared(directory: Path) -> dict[str, Any]:
    """Return the settings of both trainers."""
    return {
        "output_dir": str(directory / "output"),
        "seed": task.SEED,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "model_init_kwargs": LOADING,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def grpo(directory: Path, clock: Clock) -> GRPOTrainer:
    config = GRPOConfig(
        **shared(directory),
        learning_rate=task.LEARNING_RATE,
        max_steps=task.UPDATES,
        per_device_train_batch_size=task.PROMPTS * task.GROUP,
        steps_per_generation=1,
        num_generations=task.GROUP,
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=task.LONGEST_COMPLETION,
        temperature=task.TEMPERATURE,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        **task.CLIP,
        importance_sampling_level="token",
        scale_rewards="group",
        beta=0.0,
        mask_truncated_completions=False,
    )
    return GRPOTrainer(
        model=str(task.base("grpo")),
        reward_funcs=task.reward,
        args=config,
        train_dataset=Dataset.from_list(task.prompts()),
        processing_class=AutoTokenizer.from_pretrained(task.base("grpo")),
        callbacks=[clock],
    )


def reward(directory: Path, clock: Clock) -> RewardTrainer:
    config = RewardConfig(
        **shared(directory),
        learning_rate=task.REWARD_LEARNING_RATE,
        num_train_epochs=1,
        per_device_train_batch_size=task.PAIRS,
        train_sampling_strategy="sequential",
        max_length=task.LONGEST,
        center_rewards_coefficient=task.CENTER,
    )
    rows = [{side: row[side] for side in ("chosen_ids", "rejected_ids")} for row in task.pairs("train")]
    return RewardTrainer(
        model=str(task.base("reward")),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task.base("reward")),
        callbacks=[clock],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with TRL.")
    parser.add_argument("work", choices=task.WORKS)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    began, clock = time.time(), Clock()
    trainer = {"grpo": grpo, "reward": reward}[arguments.work](arguments.directory, clock)
    trainer.train()
    trainer.save_model(str(arguments.directory))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    curves = {name: [row[key] for row in rows] for name, key in LOGGED[arguments.work].items()}
    print(json.dumps({**task.timing(clock.over, began), **curves}))


if __name__ == "__main__":
    main()
