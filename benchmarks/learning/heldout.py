"""Measure every finished policy, ours and TRL's, with one sampler: the share of right replies to held-out orders.

    python benchmarks/learning/heldout.py [--seed 0 1 2]

Writes results/heldout.jsonl: trainer, loss, seed, `right` and `gain` (over the initial weights), each with its 95 %
interval. Prompts, not completions, are the independent draws: an interval is mean ± 1.96 standard errors over
prompts of their shares, and of the differences for `gain`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import task

from rlhf_core import load_model
from rlhf_core.sampling import Sampler, SamplingOptions
from rlhf_core.tokenizer import Encoder

FILE = task.RESULTS / "heldout.jsonl"
Z = 1.959964
"""The normal distribution's 97.5 % quantile."""


def shares(directory: Path, seed: int) -> np.ndarray:
    """The share of right ones among EVALUATION_SAMPLES replies to each held-out prompt, float64 [prompts]."""
    model = load_model(directory)
    prompts = task.prompts(seed, held_out=True)
    ids = Encoder(model.tokenizer).prompts(prompts)
    sampler = Sampler(
        model.definition,
        SamplingOptions(temperature=1.0, max_completion_length=task.LONGEST_REPLY),
        mesh=model.mesh,
        stop_ids=model.stop_ids,
        num_generations=task.EVALUATION_SAMPLES,
        prompts_per_call=64,
        max_prompt_length=max(map(len, ids)),
    )
    drawn = sampler(model.params, ids, jax.random.key(seed))
    tokens = [row[:n].tolist() for row, n in zip(drawn.tokens, drawn.lengths, strict=True)]
    assert model.tokenizer is not None
    texts = model.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    asked = [prompt for prompt in prompts for _ in range(task.EVALUATION_SAMPLES)]
    return np.array(task.right(asked, texts, tokens)).reshape(len(prompts), -1).mean(1)


def estimate(values: np.ndarray) -> list[float]:
    """[mean, low, high]."""
    mean, half = float(values.mean()), Z * float(values.std(ddof=1)) / math.sqrt(len(values))
    return [round(x, 4) for x in (mean, mean - half, mean + half)]


def measure(seed: int) -> Iterator[dict[str, Any]]:
    directory = task.RUNS / f"seed{seed}"
    before = shares(task.base(seed), seed)
    yield {"trainer": "none", "loss": None, "seed": seed, "right": estimate(before), "gain": None}
    found = {("ours", loss): directory / f"ours-{loss}" / "artifacts" / "model" for loss in task.LOSSES}
    found["trl", "dapo"] = directory / "trl-dapo"
    for (trainer, loss), model in found.items():
        if model.exists():
            after = shares(model, seed)
            run = {"trainer": trainer, "loss": loss, "seed": seed}
            yield {**run, "right": estimate(after), "gain": estimate(after - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out success of every finished run.")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    rows = [row for seed in parser.parse_args().seed for row in measure(seed)]
    FILE.unlink(missing_ok=True)
    task.append(FILE, rows)


if __name__ == "__main__":
    main()
