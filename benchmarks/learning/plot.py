"""Draw results/learning.svg: held-out reward and entropy of `dapo`, ours and TRL's, every seed and their mean.

    python benchmarks/learning/plot.py

Needs matplotlib, which nothing else here does. The same results draw the same bytes.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import task

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FILE = task.REPOSITORY / "benchmarks/learning/results/learning.svg"
TRAINERS = {"ours": ("rlhf-grpo", "#0072b2", "-"), "trl": ("TRL 1.16.0", "#d55e00", "--")}
"""Label, colour (Okabe and Ito's, distinct for colour-blind readers too) and dash of each."""


def curves(trainer: str, column: str) -> dict[int, list[tuple[int, float]]]:
    """(update, value) of each seed."""
    rows = [row for row in task.read(task.RESULTS / f"{trainer}.jsonl") if row["loss"] == "dapo"]
    return {
        seed: [
            (row["update"], row[column]) for row in rows if row["seed"] == seed and row[column] is not None
        ]
        for seed in task.SEEDS
    }


def draw(axes: Axes, column: str) -> None:
    for trainer, (label, colour, dash) in TRAINERS.items():
        seeds = [np.array(points).T for points in curves(trainer, column).values() if points]
        for x, y in seeds:
            axes.plot(x, y, dash, color=colour, linewidth=0.8, alpha=0.5)
        x, mean = seeds[0][0], np.mean([y for _, y in seeds], axis=0)
        axes.plot(x, mean, dash, color=colour, linewidth=2.2, label=f"{label}, mean of {len(seeds)} seeds")
    axes.set_xlabel("update")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    settings: dict[str, Any] = {"svg.hashsalt": "learning", "svg.fonttype": "none", "font.size": 9}
    with mpl.rc_context(settings):
        figure, (reward, entropy) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
        draw(reward, "reward")
        reward.set_title("Held-out reward: share of right replies", loc="left")
        reward.set_ylim(0.4, 1.0)
        reward.legend(loc="lower right", frameon=False)
        draw(entropy, "entropy")
        entropy.set_title("Entropy, nats a token, mean of ten updates", loc="left")
        entropy.set_ylim(bottom=0.0)
        figure.patch.set_facecolor("white")  # readable on a dark page too
        figure.savefig(FILE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
