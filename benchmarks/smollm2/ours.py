"""Train with rlhf-grpo or rlhf-reward, and print a JSON row last.

    python benchmarks/smollm2/ours.py grpo DIR

DIR gets the run; its final weights are in `artifacts/model`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import task
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_reward import RewardConfig, RewardTrainer

LOGGED = {"grpo": {"reward": "reward", "loss": "loss"}, "reward": {"loss": "loss", "accuracy": "accuracy"}}
"""Names of a row's curves: {ours here: the metric}."""


def grpo(directory: Path) -> GRPOTrainer:
    config = GRPOConfig(
        model=str(task.base("grpo")),
        train_data=str(task.RUNS / "data" / "words.train.jsonl"),
        shuffle_train_dataset=False,
        max_training_steps=task.UPDATES,
        total_batch_size=task.PROMPTS * task.GROUP,
        num_generations=task.GROUP,
        learning_rate=task.LEARNING_RATE,
        weight_decay=0.0,
        max_prompt_length=task.LONGEST_PROMPT,
        sampling={"temperature": task.TEMPERATURE, "max_completion_length": task.LONGEST_COMPLETION},
        loss={"name": "dapo", **task.CLIP},
        kl={"beta": 0.0},
        log_steps=1,
        progress_bar_type="json",
        seed=task.SEED,
        save_directory=str(directory),
    )
    return GRPOTrainer(config, rewards=[task.reward])


def reward(directory: Path) -> RewardTrainer:
    config = RewardConfig(
        model=str(task.base("reward")),
        train_data=str(task.pairs_file("train")),
        shuffle_train_dataset=False,
        num_train_epochs=1,
        total_batch_size=task.PAIRS,
        learning_rate=task.REWARD_LEARNING_RATE,
        weight_decay=0.0,
        max_sequence_length=task.LONGEST,
        loss_type="bradley_terry",
        center_rewards_coefficient=task.CENTER,
        log_steps=1,
        progress_bar_type="json",
        seed=task.SEED,
        save_directory=str(directory),
    )
    return RewardTrainer(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with this suite.")
    parser.add_argument("work", choices=task.WORKS)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    began = time.time()
    {"grpo": grpo, "reward": reward}[arguments.work](arguments.directory).train()
    rows = [row for row in task.read(arguments.directory / "metrics.jsonl") if "loss" in row]
    curves = {name: [row[key] for row in rows] for name, key in LOGGED[arguments.work].items()}
    print(json.dumps({**task.timing([row["time"] for row in rows], began), **curves}))


if __name__ == "__main__":
    main()
