"""Time updates whose rollout takes as long as the update itself, with k = 0 and k = 1.

    python benchmarks/ahead/waiting.py [--rounds 3]

Both waits are sleeps, so that the numbers do not depend on what else the machine does: the engine's is a sampler that
publishes policies like those of rlhf-remote and sleeps before it returns; the trainer's is in the advantage, which runs
between a rollout and its updates. Prints the median seconds per update and appends them to results/waiting.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rlhf_core import ADVANTAGE, SAMPLER, AdvantageInputs, Registry, Rollouts, hookimpl, run_pipeline

HERE = Path(__file__).resolve().parent
SECONDS = 1.0
"""Seconds that a rollout takes, and that an update takes."""
UPDATES, FIRST = 12, 4
"""Updates per run, and how many of the first are not timed: programs compile, and rollouts are by the first policy."""


class SlowEngine:
    """Samples tokens at random, in `seconds`."""

    def __init__(self, seconds: float, inputs: Any) -> None:
        self.seconds, self.inputs = seconds, inputs

    def publish(self, params: Any, version: int) -> int:
        del params
        return version

    def published(self, version: int) -> int:
        return version

    def retire(self, before: int) -> None:
        del before

    def __call__(self, version: int, prompts: Any, key: Any, ids: Any = None) -> Rollouts:
        del key, ids
        time.sleep(self.seconds)
        shape = len(prompts) * self.inputs.num_generations, self.inputs.options.max_completion_length
        tokens = np.random.default_rng(version).integers(3, 20, shape).astype(np.int32)
        lengths = np.full(shape[0], shape[1], np.int32)
        return Rollouts(tokens, lengths, np.full(shape, -3.0, np.float32), np.zeros(shape[0], bool))


@dataclass(frozen=True)
class Sampler:
    """The component of the engine."""

    seconds: float = 0.0

    def __call__(self, inputs: Any) -> SlowEngine:
        return SlowEngine(self.seconds, inputs)


@dataclass(frozen=True)
class SlowAdvantage:
    """Returns the rewards, after `seconds`."""

    seconds: float = 0.0

    def __call__(self, inputs: AdvantageInputs) -> Any:
        time.sleep(self.seconds)
        return inputs.rewards


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(SAMPLER, "slow", Sampler)
    registry.add(ADVANTAGE, "slow", SlowAdvantage)


def length(completion_ids: Any) -> list[float]:
    """A reward that takes no time."""
    return [float(ids[0]) for ids in completion_ids]


PIPELINE = """
[[stage]]
name = "policy"
trainer = "grpo"
model = {{ model_type = "llama", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, \
intermediate_size = 24, tokenizer = "tokenizer" }}
train_data = "prompts.jsonl"
rewards = ["{file}:length"]
total_batch_size = 8
num_generations = 4
max_training_steps = {updates}
num_train_epochs = {updates}
sampling = {{ max_completion_length = 8 }}
max_prompt_length = 16
log_steps = 1
num_preview_samples = 0
rollouts_ahead = {ahead}
sampler = {{ name = "slow", seconds = {rollout} }}
advantage = {{ name = "slow", seconds = {update} }}
"""


def run(ahead: int, rollout: float, update: float) -> float:
    """Return the median seconds per update. rollout, update: seconds that each sleeps."""
    sys.path.append(str(HERE.parents[1]))
    from tests.recipes.data import write_tokenizer

    file = HERE / "waiting.py"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tokenizer(directory / "tokenizer")
        rows = [json.dumps({"prompt": f"say {word}"}) + "\n" for word in ("kite", "book", "lamp", "drum")]
        (directory / "prompts.jsonl").write_text("".join(rows))
        text = PIPELINE.format(file=file, updates=UPDATES, ahead=ahead, rollout=rollout, update=update)
        (directory / "p.toml").write_text(text)
        run_pipeline(directory / "p.toml", plugins=[file], dir=directory / "run")
        lines = (directory / "run" / "policy" / "metrics.jsonl").read_text("utf-8").splitlines()
    times = [json.loads(line)["time"] for line in lines]
    return median(np.diff(times)[FIRST:].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Does k = 1 hide the wait?")
    parser.add_argument("--rounds", type=int, default=3)
    found: dict[str, list[float]] = {"update": [], "rollout": [], "k = 0": [], "k = 1": []}
    for _ in range(parser.parse_args().rounds):
        found["update"].append(run(0, 0.0, SECONDS))
        found["rollout"].append(run(0, SECONDS, 0.0))
        found["k = 0"].append(run(0, SECONDS, SECONDS))
        found["k = 1"].append(run(1, SECONDS, SECONDS))
    row = {name: round(median(seconds), 3) for name, seconds in found.items()}
    row["k = 1 / the larger"] = round(row["k = 1"] / max(row["update"], row["rollout"]), 3)
    row["k = 0 / the sum"] = round(row["k = 0"] / (row["update"] + row["rollout"]), 3)
    with open(HERE / "results" / "waiting.jsonl", "a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
