"""Train the reward models, take the best of n by each, and train a policy with each.

    python benchmarks/trust/run.py MODEL

MODEL is the directory that examples/smollm2/prepare.py makes. Writes results/best_of_n.jsonl and
results/policies.jsonl; what is there already is not run again. A proxy is a reward model's score, less its mean over
completions of MODEL, divided by their standard deviation.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import task
from measure import complete
from pairs import write_pairs
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_reward import RewardConfig, RewardTrainer
from tasks import generate

from rlhf_core import RunError, load_model
from rlhf_core.scoring import Scorer

BEST_OF_N, POLICIES = task.RESULTS / "best_of_n.jsonl", task.RESULTS / "policies.jsonl"
DATA = task.RUNS / "data"


def write_data(model: str) -> None:
    """Write the tasks and the preference data of each size, if missing."""
    if all((DATA / f"pairs.{size}.jsonl").exists() for size in task.PAIRS):
        return
    generate(DATA, seed=task.SEED)
    write_pairs(DATA, load_model(model), prompts=task.PAIR_PROMPTS, seed=task.SEED, longest=task.LONGEST)
    rows = (DATA / "pairs.jsonl").read_text("utf-8").splitlines(keepends=True)
    for size in task.PAIRS:
        if len(rows) < size:
            raise SystemExit(f"PAIR_PROMPTS = {task.PAIR_PROMPTS} gives {len(rows)} pairs, fewer than {size}")
        (DATA / f"pairs.{size}.jsonl").write_text("".join(rows[:size]), encoding="utf-8")


def reward_model(size: int) -> Path:
    return task.RUNS / f"rm-{size}" / "artifacts" / "model"


def train_reward_model(model: str, size: int) -> None:
    if reward_model(size).exists():
        return
    config = RewardConfig(
        model=model,
        train_data=str(DATA / f"pairs.{size}.jsonl"),
        max_training_steps=task.REWARD_UPDATES,
        total_batch_size=16,
        learning_rate=2e-5,
        warmup_steps=3,
        weight_decay=0.0,
        max_sequence_length=128,
        center_rewards_coefficient=0.01,
        log_steps=1,
        seed=task.SEED,
        save_directory=str(task.RUNS / f"rm-{size}"),
    )
    RewardTrainer(config).train()


def best_of_n(proxy: np.ndarray, values: np.ndarray, n: int) -> float:
    """Estimate the mean value of the best of n completions by proxy, from N ≥ n completions of each prompt.

    proxy, values: float64 [prompts, N]. Averages over all draws of n of the N, so that it is without bias: the
    completion of rank i from below is the best of comb(i − 1, n − 1) of comb(N, n) draws.
    """
    count = proxy.shape[1]
    weights = np.array([math.comb(i, n - 1) for i in range(count)], np.float64) / math.comb(count, n)
    ranked = np.take_along_axis(values, np.argsort(proxy, axis=1, kind="stable"), axis=1)
    return float((ranked @ weights).mean())


def draw(model: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Sample the completions for best-of-n; return the row and the text of each, those of a prompt together."""
    rows = task.read(DATA / "words.heldout.jsonl")[: task.HELD_OUT]
    drawn = complete(
        load_model(model),
        [row["prompt"] for row in rows],
        task.SEED,
        temperature=task.TEMPERATURE,
        max_completion_length=task.LONGEST,
        num_generations=task.SAMPLES,
    )
    return [row for row in rows for _ in range(task.SAMPLES)], [text for text, _ in drawn]


def measure_best_of_n(model: str) -> None:
    """Append a row for each size and n, and the mean and standard deviation of each reward model's scores."""
    if BEST_OF_N.exists():
        return
    rows, texts = draw(model)
    said = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: [row[name] for row in rows] for name in ("needed", "banned", "least", "limit")}
    grades = np.array(task.gold(said, **columns)).reshape(-1, task.SAMPLES)
    successes = np.array(task.right(said, **columns)).reshape(-1, task.SAMPLES)
    measured = []
    for size in task.PAIRS:
        scores = Scorer.load(reward_model(size)).score_completions([row["prompt"] for row in rows], said)
        proxy = scores.astype(np.float64).reshape(-1, task.SAMPLES)
        mean, spread = float(proxy.mean()), float(proxy.std())
        for n in (2**i for i in range(int(math.log2(task.SAMPLES)) + 1)):
            measured.append(
                {
                    "pairs": size,
                    "n": n,
                    "kl": math.log(n) - (n - 1) / n,
                    "proxy": (best_of_n(proxy, proxy, n) - mean) / spread,
                    "gold": best_of_n(proxy, grades, n),
                    "right": best_of_n(proxy, successes, n),
                    "mean": mean,
                    "spread": spread,
                }
            )
    task.append(BEST_OF_N, measured)


def train_policy(model: str, run: task.Run, scale: Mapping[str, float]) -> None:
    """Train a policy, log its gold grades without rewarding them, and append a row per update."""
    directory = task.RUNS / f"policy-{run.pairs}-{run.beta:g}-{run.limit or 0:g}"
    rewards: list[Any] = [
        {"name": "model", "model": str(reward_model(run.pairs)), "label": "proxy"},
        {"name": f"{task.HERE / 'task.py'}:gold", "weight": 0.0, "label": "gold"},
        {"name": f"{task.HERE / 'task.py'}:right", "weight": 0.0, "label": "right"},
    ]
    config = GRPOConfig(
        model=model,
        train_data=str(DATA / "words.train.jsonl"),
        rewards=rewards,
        max_training_steps=task.UPDATES,
        total_batch_size=task.PROMPTS * task.GROUP,
        num_generations=task.GROUP,
        learning_rate=task.LEARNING_RATE,
        warmup_steps=3,
        weight_decay=0.0,
        max_prompt_length=96,
        sampling={"temperature": task.TEMPERATURE, "max_completion_length": task.LONGEST},
        kl={"beta": run.beta},
        limits={"kl": run.limit or task.UNREACHED},
        log_steps=1,
        seed=task.SEED,
        save_directory=str(directory),
    )
    try:
        GRPOTrainer(config).train()
    except RunError as error:
        if run.limit is None or "above limits.kl" not in str(error):
            raise
    lines = (directory / "metrics.jsonl").read_text("utf-8").splitlines()
    logged = [row for row in map(json.loads, lines) if "kl" in row]
    task.append(
        POLICIES,
        [
            {
                "pairs": run.pairs,
                "beta": run.beta,
                "limit": run.limit,
                "update": row["step"],
                "kl": row["kl"] * row["completions/mean_length"],
                "kl_per_token": row["kl"],
                "proxy": (row["rewards/proxy/mean"] - scale["mean"]) / scale["spread"],
                "gold": row["rewards/gold/mean"],
                "right": row["rewards/right/mean"],
                "length": row["completions/mean_length"],
            }
            for row in logged
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Proxy and gold, by best-of-n and by GRPO.")
    parser.add_argument("model")
    model = str(Path(parser.parse_args().model).resolve())
    write_data(model)
    for size in task.PAIRS:
        train_reward_model(model, size)
    measure_best_of_n(model)
    scales = {row["pairs"]: row for row in task.read(BEST_OF_N)}
    done = set(map(task.Run.of, task.read(POLICIES)))
    for run in task.POLICIES:
        if run not in done:
            train_policy(model, run, scales[run.pairs])


if __name__ == "__main__":
    main()
