"""Train TRL's RewardTrainer on the same pairs from the same weights, in an environment of its own.

    python benchmarks/reward/trl_runner.py [--seed 0 1 2]

Leaves the final weights in `runs/reward/seedN/trl`. speed.py runs it with --speed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import task
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import RewardConfig, RewardTrainer


def config(directory: Path, seed: int, **more: Any) -> RewardConfig:
    """Return `task`'s settings, and TRL's fields whose defaults differ from ours."""
    return RewardConfig(
        output_dir=str(directory),
        seed=seed,
        per_device_train_batch_size=task.BATCH,
        gradient_accumulation_steps=1,
        train_sampling_strategy="sequential",
        max_length=task.LONGEST,
        disable_dropout=True,
        center_rewards_coefficient=task.CENTER,
        learning_rate=task.LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        weight_decay=task.WEIGHT_DECAY,
        max_grad_norm=task.MAX_GRAD_NORM,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=task.LOG_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


class Clock(TrainerCallback):
    """When each interval of LOG_STEPS updates was over."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % task.LOG_STEPS == 0:
            self.logged.append((state.global_step, time.time()))


def trainer(seed: int, args: RewardConfig) -> RewardTrainer:
    model = str(task.base(seed))
    rows = [
        {"chosen_ids": row["chosen_ids"], "rejected_ids": row["rejected_ids"]}
        for row in task.pairs(seed, "train")
    ]
    return RewardTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def train(seed: int) -> None:
    directory = task.directory(seed) / "trl"
    if directory.exists():
        return
    made = trainer(seed, config(task.directory(seed) / "trl-output", seed, num_train_epochs=task.EPOCHS))
    made.train()
    made.save_model(str(directory))


def speed(directory: Path) -> dict[str, Any]:
    """A timed run, without evaluations."""
    clock = Clock()
    started = time.time()
    made = trainer(task.SPEED_SEED, config(directory, task.SPEED_SEED, max_steps=task.SPEED_UPDATES))
    made.add_callback(clock)
    made.train()
    return task.timing("trl", started, clock.logged)


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward models by TRL.")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    parser.add_argument("--speed", type=Path, help="only a timed run in this directory; prints its row")
    arguments = parser.parse_args()
    if arguments.speed:
        print(json.dumps(speed(arguments.speed)))
        return
    for seed in arguments.seed:
        train(seed)


if __name__ == "__main__":
    main()
