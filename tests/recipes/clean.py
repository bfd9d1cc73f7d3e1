"""How the sampling test judges an honest sampler, whatever is selected: the distribution of z, and the largest M.

    python tests/recipes/clean.py [--seeds 3] [--updates 40] [--also NAME=STAGE…]… [DIR]

One pipeline per seed: the recipes' base, and a policy that learns from it for every kind of selection, until nearly all
of its replies are right. z would be biased if the test saw only what is kept. `--also "tools=runs/tools-*/policy"` is a
line about stages of other pipelines that logged every update.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import data
import numpy as np

HERE = Path(__file__).resolve().parent
ENVIRONMENT = '''
from rewards import grade
from rlhf_core import Turn


class Tries:
    """Gives a second try, and fails where a reply is three words long."""

    def reset(self, row, seed):
        self.row, self.tried = row, 0
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, completion):
        self.tried += 1
        if len(completion["content"].split()) == 3:
            raise ValueError("three words")
        value = grade(completion["content"], self.row["word"], self.row["count"])
        return Turn([{"role": "user", "content": "say"}], value, done=value == 1 or self.tried == 2)
'''
POLICY = """
[[stage]]
name = "{name}"
trainer = "grpo"
model = "base.model"
train_data = "data/prompts.jsonl"
num_generations = 8
total_batch_size = 64
max_training_steps = {updates}
learning_rate = 1e-3
max_prompt_length = 16
log_steps = 1
num_preview_samples = 0
{options}
"""
REWARD = 'rewards = ["rewards.py:right"]\n'
SHORT = "sampling = { max_completion_length = 8 }\n"
KINDS = {
    "all": REWARD + SHORT,
    "several-updates": REWARD + SHORT + "num_iterations = 2\n",
    "mixed-groups": REWARD + SHORT + "dynamic_sampling = { max_rounds = 3 }\n",
    "filters": REWARD + "sampling = { top_p = 0.95, max_completion_length = 8 }\n",
    "cut-and-masked": REWARD
    + "mask_truncated_completions = true\nsampling = { max_completion_length = 4 }\n",
    "failing-episodes": 'chat_template = "plain"\nmax_prompt_length = 32\n'
    + 'environment = { name = "tries.py:Tries", max_turns = 2 }\n'
    + SHORT,
}


def write(directory: Path, seed: int, updates: int) -> Path:
    """Write data, rewards, environment and pipeline; return the pipeline."""
    data.generate(directory / "data", seed)
    (directory / "rewards.py").write_bytes((HERE / "rewards.py").read_bytes())
    (directory / "tries.py").write_text(ENVIRONMENT)
    stages = [(HERE / "base.toml").read_text().replace("seed = 0", f"seed = {seed}")]
    for name, options in KINDS.items():
        stage = POLICY.format(name=name, updates=updates, options=options)
        if name == "failing-episodes":
            stage = stage.replace("max_prompt_length = 16\n", "")
        stages.append(stage)
    pipeline = directory / "pipeline.toml"
    pipeline.write_text("\n".join(stages))
    return pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge honest rollouts by the sampling test.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=40, help="of each policy")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=STAGE…", help="finished stages")
    parser.add_argument("directory", type=Path, nargs="?")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clean-") as name:
        directory = given.directory or Path(name)
        for seed in range(given.seeds):
            own = directory / str(seed)
            own.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "rlhf_core.cli", "run", str(write(own, seed, given.updates))]
            subprocess.run(command, cwd=own, check=True, stdout=subprocess.DEVNULL)
        kinds = {name.replace("-", " "): sorted(directory.glob(f"*/run/{name}")) for name in KINDS}
        for also in given.also:
            named, _, pattern = also.partition("=")
            kinds[named] = sorted(Path().glob(pattern))
        print(table(kinds), end="")


def table(kinds: Mapping[str, Sequence[Path]]) -> str:
    """Return the lines of Markdown that trust.md has. kinds: {name: stages}."""
    heads = [
        "what is kept",
        "rollouts",
        "last reward",
        "mean z",
        "standard deviation",
        "largest \\|z\\|",
        "largest M",
    ]
    lines = [heads, ["---"] * len(heads)]
    every: list[dict[str, float]] = []
    for name, stages in kinds.items():
        rows, last = [], []
        for stage in stages:
            found = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
            rows += [row for row in found if "sampling/surprisal_z" in row]
            last += [row["reward"] for row in found[-5:] if "reward" in row]
        lines.append(line(name, rows, float(np.mean(last))))
        every += rows
    lines.append(line("together", every, math.nan))
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def line(name: str, rows: list[dict[str, float]], reward: float) -> list[str]:
    z = np.array([row["sampling/surprisal_z"] for row in rows])
    most = max(row["sampling/surprisal_evidence"] for row in rows)
    shown = "" if math.isnan(reward) else f"{reward:.2f}"
    numbers = (f"{z.mean():+.2f}", f"{z.std():.2f}", f"{np.abs(z).max():.1f}", f"{10**most:.2g}")
    return [name, f"{len(z):,}", shown, *numbers]


if __name__ == "__main__":
    main()
