"""Train with rlhf-grpo: each loss and seed from the same weights. What is in the results already is not run again.

    python benchmarks/learning/ours.py [--loss dapo …] [--seed 0 1 2]

Appends to results/ours.jsonl: loss, seed, update, the held-out reward, and the means over the updates since the last
row of entropy, kl (nats a token) and clipped (share of tokens, or of the weight for cispo).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import task
from heldout import draw
from rlhf_grpo import GRPOConfig, GRPOTrainer

from rlhf_core import load_model

FILE = task.RESULTS / "ours.jsonl"


def config(loss: str, seed: int, directory: Path) -> GRPOConfig:
    return GRPOConfig(
        model=str(task.base(seed)),
        train_data=str(task.data(seed) / "prompts.jsonl"),
        eval_data=str(task.data(seed) / "prompts.heldout.jsonl"),
        shuffle_train_dataset=False,
        max_training_steps=task.UPDATES,
        total_batch_size=task.PROMPTS * task.GROUP,
        num_generations=task.GROUP,
        num_iterations=task.ITERATIONS,
        learning_rate=task.LEARNING_RATE,
        weight_decay=0.0,
        max_prompt_length=task.LONGEST_PROMPT,
        sampling={"temperature": 1.0, "max_completion_length": task.LONGEST_REPLY},
        loss={"name": loss, **task.LOSSES[loss]},
        kl={"name": "k3", "beta": task.BETA},
        evaluation={"num_generations": task.EVALUATION_SAMPLES},
        evaluation_steps=task.EVALUATION_STEPS,
        log_steps=task.EVALUATION_STEPS,
        seed=seed,
        save_directory=str(directory),
    )


def train(loss: str, seed: int) -> list[dict[str, Any]]:
    """Train, and return a row per evaluation; the one before the first update has only a reward."""
    directory = task.RUNS / f"seed{seed}" / f"ours-{loss}"
    GRPOTrainer(config(loss, seed, directory), rewards=[task.right]).train()
    run = {"loss": loss, "seed": seed}
    before = float(draw(load_model(task.base(seed)), seed).shares.mean())
    rows = [{**run, "update": 0, "reward": before, "entropy": None, "kl": None, "clipped": None}]
    for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines():
        logged = json.loads(line)
        names = {"reward": "eval_reward", "entropy": "entropy", "kl": "kl"}
        found = {name: logged.get(key) for name, key in names.items()}
        rows.append(
            {**run, "update": logged["step"], **found, "clipped": logged.get("clip_ratio/region_mean")}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning curves of rlhf-grpo.")
    parser.add_argument("--loss", nargs="+", choices=tuple(task.LOSSES), default=tuple(task.LOSSES))
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    arguments = parser.parse_args()
    for loss in arguments.loss:
        for seed in arguments.seed:
            if not any(row["loss"] == loss and row["seed"] == seed for row in task.read(FILE)):
                task.append(FILE, train(loss, seed))


if __name__ == "__main__":
    main()
