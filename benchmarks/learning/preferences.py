"""Train on preferences with each trainer and loss, and measure what is right on held-out orders before and after.

    python benchmarks/learning/prepare.py --seed 0 1 2 3
    python benchmarks/learning/preferences.py --trial                  seed 3, each learning rate of RATES
    python benchmarks/learning/preferences.py [--name kto …] [--seed 0 1 2]
    python benchmarks/learning/preferences.py --table                  the table of docs/results/learning.md

All runs of a seed start from one base. dpo and kto read the quickstart's pairs; online_dpo its prompts, with the rule
`task.right` as the reward. Appends a row per run to results/preferences.jsonl, of --trial to preferences_trial.jsonl,
with name, seed, learning_rate, `before`, `right`, `gain` ([mean, low, high] of 95 % intervals over prompts), `kl` and
`entropy` (nats per token). A run that is there already is not made again.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import heldout
import numpy as np
import task
from rlhf_dpo import DPOConfig, DPOTrainer, OnlineDPOConfig, OnlineDPOTrainer
from rlhf_kto import KTOConfig, KTOTrainer
from table import FILE as PAGE
from table import interval, table

from rlhf_core import load_model

FILE = task.RESULTS / "preferences.jsonl"
TRIAL = task.RESULTS / "preferences_trial.jsonl"
TRIAL_SEED = 3
UPDATES = 64
PAIRS = 64
"""Of an update; as two rows each for kto."""
RATES = (1e-4, 3e-4)
"""Learning rates that the trial compares."""
START, STOP = "<!-- preferences: written by preferences.py -->", "<!-- end of preferences -->"


class Run(NamedTuple):
    """What one line of the table trains with; the rest is the same for all, or the trainer's default."""

    trainer: str
    loss: str
    learning_rate: float = 1e-4


RUNS: Mapping[str, Run] = {
    "sigmoid": Run("dpo", "sigmoid"),
    "simpo": Run("dpo", "simpo"),
    "orpo": Run("dpo", "orpo"),
    "cpo": Run("dpo", "cpo"),
    "kto": Run("kto", "kto"),
    "apo_zero_unpaired": Run("kto", "apo_zero_unpaired"),
    "online_dpo": Run("online_dpo", "sigmoid"),
}


def common(run: Run, seed: int, directory: Path) -> dict[str, Any]:
    """The options that all three trainers have."""
    return {
        "model": str(task.base(seed)),
        "loss": run.loss,
        "max_training_steps": UPDATES,
        "learning_rate": run.learning_rate,
        "warmup_steps": 5,
        "scheduler": "constant",
        "weight_decay": 0.0,
        "log_steps": UPDATES,
        "seed": seed,
        "save_directory": str(directory),
    }


def train(run: Run, seed: int, directory: Path) -> None:
    """Train from the seed's base; the policy is left in `directory`/artifacts/model."""
    options = common(run, seed, directory)
    pairs = {"train_data": str(task.data(seed) / "pairs.jsonl"), "max_sequence_length": 48}
    if run.trainer == "dpo":
        DPOTrainer(DPOConfig(**options, **pairs, total_batch_size=PAIRS)).train()
    elif run.trainer == "kto":
        KTOTrainer(KTOConfig(**options, **pairs, total_batch_size=2 * PAIRS)).train()
    else:
        sampled = OnlineDPOConfig(
            **options,
            train_data=str(task.data(seed) / "prompts.jsonl"),
            total_batch_size=task.PROMPTS * task.GROUP,
            num_generations=task.GROUP,
            max_prompt_length=task.LONGEST_PROMPT,
            sampling={"temperature": 1.0, "max_completion_length": task.LONGEST_REPLY},
            num_preview_samples=0,
        )
        OnlineDPOTrainer(sampled, rewards=[task.right]).train()


@cache
def before(seed: int) -> np.ndarray:
    """The base's share of right replies to each held-out prompt, float64 [P]."""
    return heldout.draw(load_model(task.base(seed)), seed).shares


def measure(name: str, run: Run, seed: int) -> dict[str, Any]:
    """Train one run and measure its policy."""
    directory = task.RUNS / f"seed{seed}" / f"preferences-{name}"
    shutil.rmtree(directory, ignore_errors=True)
    train(run, seed, directory)
    policy = load_model(directory / "artifacts" / "model")
    replies = heldout.draw(policy, seed)
    kl, entropy = heldout.nats(policy, load_model(task.base(seed)), replies)
    right = {
        "before": heldout.estimate(before(seed)),
        "right": heldout.estimate(replies.shares),
        "gain": heldout.estimate(replies.shares - before(seed)),
    }
    about = {"name": name, "seed": seed, "learning_rate": run.learning_rate}
    return {**about, **right, "kl": kl, "entropy": entropy}


def write_table() -> None:
    """Write a line for every run that is in the results."""
    found = {(row["name"], row["seed"]): row for row in task.read(FILE)}
    lines = []
    for name, seed in sorted(found, key=lambda run: (list(RUNS).index(run[0]), run[1])):
        row, run = found[name, seed], RUNS[name]
        shares = [interval(row["before"]), interval(row["right"]), interval(row["gain"], "+")]
        nats = [f"{row[each]:.3f}" for each in ("kl", "entropy")]
        lines.append([f"`{run.trainer}`", f"`{run.loss}`", str(seed), *shares, *nats])
    head = ["trainer", "loss", "seed", "before, %", "after, %", "gain, points", "KL", "entropy"]
    body, text = f"{START}\n\n{table(head, lines)}\n\n{STOP}", PAGE.read_text("utf-8")
    PAGE.write_text(re.sub(f"{START}.*?{STOP}", lambda _: body, text, flags=re.DOTALL), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trainers on preferences.")
    parser.add_argument("--name", nargs="+", choices=tuple(RUNS), default=tuple(RUNS))
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    parser.add_argument("--trial", action="store_true", help=f"seed {TRIAL_SEED}, each learning rate")
    parser.add_argument("--table", action="store_true", help="write the table")
    arguments = parser.parse_args()
    if arguments.table:
        write_table()
        return
    file, wanted = FILE, [(name, RUNS[name], seed) for seed in arguments.seed for name in arguments.name]
    if arguments.trial:
        file = TRIAL
        wanted = [
            (name, RUNS[name]._replace(learning_rate=rate), TRIAL_SEED)
            for name in arguments.name
            for rate in RATES
        ]
    there = {(row["name"], row["learning_rate"], row["seed"]) for row in task.read(file)}
    for name, run, seed in wanted:
        if (name, run.learning_rate, seed) not in there:
            task.append(file, [measure(name, run, seed)])


if __name__ == "__main__":
    main()
