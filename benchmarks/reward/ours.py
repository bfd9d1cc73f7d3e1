"""Train rlhf-reward's RewardTrainer for each seed.

    python benchmarks/reward/ours.py [--seed 0 1 2]
    python benchmarks/reward/ours.py --seed 10 --learning_rate 1e-4 3e-4 1e-3 --epochs 3     (the trial)

Appends to results/ours.jsonl (the trial's: results/trial.jsonl) the held-out accuracy and loss after every epoch, and
leaves the final weights in `runs/reward/seedN/ours`. speed.py runs it with --speed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import task
from rlhf_reward import RewardConfig, RewardTrainer

FILE = task.RESULTS / "ours.jsonl"


def config(seed: int, directory: Path, rate: float = task.LEARNING_RATE, **more: Any) -> RewardConfig:
    return RewardConfig(
        model=str(task.base(seed)),
        train_data=str(task.file(seed, "train")),
        learning_rate=rate,
        total_batch_size=task.BATCH,
        shuffle_train_dataset=False,
        max_sequence_length=task.LONGEST,
        optimizer="adamw",
        weight_decay=task.WEIGHT_DECAY,
        max_grad_norm=task.MAX_GRAD_NORM,
        loss_type="bradley_terry",
        center_rewards_coefficient=task.CENTER,
        log_steps=task.LOG_STEPS,
        progress_bar_type="json",
        save_directory=str(directory),
        seed=seed,
        **more,
    )


def logged(directory: Path) -> list[dict[str, Any]]:
    return task.read(directory / "metrics.jsonl")


def train(seed: int, rate: float, epochs: int, directory: Path) -> list[dict[str, Any]]:
    """Train, and return a row per epoch."""
    epoch = len(task.updates(seed))
    RewardTrainer(
        config(
            seed,
            directory,
            rate,
            num_train_epochs=epochs,
            eval_data=str(task.file(seed, "heldout")),
            evaluation_steps=epoch,
        )
    ).train()
    return [
        {
            "seed": seed,
            "learning_rate": rate,
            "epoch": row["step"] // epoch,
            "accuracy": row["eval_accuracy"],
            "loss": row["eval_loss"],
        }
        for row in logged(directory)
        if "eval_accuracy" in row
    ]


def speed(directory: Path) -> dict[str, Any]:
    """A timed run, without evaluations."""
    settings = config(task.SPEED_SEED, directory, max_training_steps=task.SPEED_UPDATES)
    started = time.time()
    RewardTrainer(settings).train()
    return task.timing("ours", started, [(row["step"], row["time"]) for row in logged(directory)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Reward models by rlhf-reward.")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    parser.add_argument("--learning_rate", type=float, nargs="+", default=[task.LEARNING_RATE])
    parser.add_argument("--epochs", type=int, default=task.EPOCHS)
    parser.add_argument("--speed", type=Path, help="only a timed run in this directory; prints its row")
    arguments = parser.parse_args()
    if arguments.speed:
        print(json.dumps(speed(arguments.speed)))
        return
    for seed in arguments.seed:
        for rate in arguments.learning_rate:
            trial = seed == task.TRIAL
            file = task.RESULTS / "trial.jsonl" if trial else FILE
            if any((row["seed"], row["learning_rate"]) == (seed, rate) for row in task.read(file)):
                continue
            directory = task.directory(seed) / (f"ours-{rate:g}" if trial else "ours")
            shutil.rmtree(directory, ignore_errors=True)
            task.append(file, train(seed, rate, arguments.epochs, directory))


if __name__ == "__main__":
    main()
