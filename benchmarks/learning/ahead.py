"""Train the quickstart's policy with rollouts ahead: how much is right on held-out orders after equal updates?

    python benchmarks/learning/ahead.py [--ahead 0 1 4] [--seed 0 1 2 3 4] [--runs 1]

Every run starts from the base and the reward model of `make demo`, seed 0, and makes its 120 updates; seeds differ in
the order of prompts and in what is sampled. Appends a row per run to results/ahead.jsonl, and a run that is there
already is not made again, so that it can be stopped and continued. `--table` writes the table of
docs/results/learning.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import tomllib
from collections.abc import Sequence
from typing import Any

import numpy as np
import task
from rlhf_grpo import GRPOConfig, GRPOTrainer

FILE = task.RESULTS / "ahead.jsonl"
PAGE = task.REPOSITORY / "docs/results/learning.md"
QUICKSTART = task.REPOSITORY / "runs" / "quickstart-seed0"
SEEDS = (0, 1, 2, 3, 4)
AHEAD = (0, 1, 4, 2)
STEPS = 30
"""Updates between evaluations."""
SAMPLES = 2
"""Completions of each held-out prompt in an evaluation."""
T = 2.776445
"""Student's t, 97.5 % quantile, 4 degrees of freedom: of five seeds."""


def config(ahead: int, corrected: bool, seed: int, directory: str) -> GRPOConfig:
    """Take the quickstart's stage `policy`; change where it starts, the seed and what is measured."""
    stages = tomllib.loads((task.QUICKSTART / "quickstart.toml").read_text("utf-8"))["stage"]
    own = {key: value for key, value in stages[2].items() if key not in ("name", "trainer", "rewards")}
    measured = {
        "model": str(QUICKSTART / "base" / "artifacts" / "model"),
        "train_data": str(QUICKSTART / "data" / "prompts.jsonl"),
        "eval_data": str(QUICKSTART / "data" / "prompts.heldout.jsonl"),
        "evaluation": {"num_generations": SAMPLES},
        "evaluation_steps": STEPS,
        "log_steps": STEPS,
        "num_preview_samples": 0,
        "reward_weights": [1.0, 0.0],
        "journal": "until_checkpoint",
        "seed": seed,
        "save_directory": directory,
    }
    correction = {} if corrected else {"sampler_correction": {"mode": "off"}}
    return GRPOConfig.from_dict({**own, **measured, **correction, "rollouts_ahead": ahead})


def train(ahead: int, corrected: bool, seed: int) -> dict[str, Any]:
    """Train, and return the share that is right by update, 0 to 1, and the last interval's means."""
    directory = task.RUNS / "ahead" / f"{ahead}-{'corrected' if corrected else 'plain'}-{seed}"
    rewards = [str(QUICKSTART / "rm" / "artifacts" / "model"), task.right]
    GRPOTrainer(config(ahead, corrected, seed, str(directory)), rewards=rewards).train()
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()]
    shutil.rmtree(directory)
    success = {row["step"]: row["eval_rewards/right/mean"] for row in rows if "eval_reward" in row}
    last = {name: rows[-1].get(name) for name in ("kl", "entropy", "grad_norm", "rollout/lag")}
    return {"ahead": ahead, "corrected": corrected, "seed": seed, "right": success, **last}


def interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and half width of the 95 % interval over five seeds, in percent."""
    x = 100 * np.asarray(values, np.float64)
    return f"{x.mean():{sign}.1f} ± {T * x.std(ddof=1) / math.sqrt(len(x)):.1f}"


def table() -> str:
    """Make the table of what all seeds ran: what is right by update, and at the end against k = 0 of the same seed."""
    found: dict[tuple[int, bool], dict[int, Any]] = {}
    for row in task.read(FILE):
        found.setdefault((row["ahead"], row["corrected"]), {})[row["seed"]] = row
    found = {setting: runs for setting, runs in found.items() if len(runs) == len(SEEDS)}
    zero = found[0, True]
    steps = list(next(iter(zero.values()))["right"])
    head = ["k", "correction", *(f"after {step}" for step in steps), "last, against k = 0", "KL"]
    lines = []
    for (ahead, corrected), runs in sorted(found.items(), key=lambda each: (each[0][0], not each[0][1])):
        cells = [interval([run["right"][step] for run in runs.values()]) for step in steps]
        paired = [run["right"][steps[-1]] - zero[s]["right"][steps[-1]] for s, run in runs.items()]
        words = "none is needed" if not ahead else "token, at most 2" if corrected else "off"
        kl = np.mean([run["kl"] for run in runs.values()])
        lines.append([str(ahead), words, *cells, interval(paired, "+") if ahead else "", f"{kl:.3f}"])
    rule = ["---:", "---"] + ["---:"] * (len(head) - 2)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Learning with rollouts ahead.")
    parser.add_argument("--ahead", type=int, nargs="+", default=AHEAD)
    parser.add_argument("--seed", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--runs", type=int, help="how many to make; none: all that are missing")
    parser.add_argument("--table", action="store_true", help="write the table")
    arguments = parser.parse_args()
    if arguments.table:
        start, stop = "<!-- ahead: written by ahead.py -->", "<!-- end of ahead -->"
        body, text = f"{start}\n\n{table()}\n\n{stop}", PAGE.read_text("utf-8")
        PAGE.write_text(re.sub(f"{start}.*?{stop}", lambda _: body, text, flags=re.DOTALL), encoding="utf-8")
        return
    wanted = [(k, True, seed) for k in arguments.ahead for seed in arguments.seed]
    wanted += [(k, False, seed) for k in arguments.ahead if k for seed in arguments.seed]
    there = {(row["ahead"], row["corrected"], row["seed"]) for row in task.read(FILE)}
    for run in [each for each in wanted if each not in there][: arguments.runs]:
        task.append(FILE, [train(*run)])


if __name__ == "__main__":
    main()
