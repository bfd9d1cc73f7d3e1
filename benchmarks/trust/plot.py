"""Draw results/trust.svg: proxy and gold over the KL to the initial policy, by best-of-n and by GRPO.

    python benchmarks/trust/plot.py

Needs matplotlib, which nothing else here does. The same results draw the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import task

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FILE = task.RESULTS / "trust.svg"
COLOURS = dict(zip(task.PAIRS, ("#d55e00", "#0072b2", "#009e73"), strict=True))
"""Okabe and Ito's, distinct for colour-blind readers too."""
WINDOW = 3
"""Updates over which curves of GRPO are averaged."""


def smooth(values: Sequence[float]) -> np.ndarray:
    """Average over WINDOW neighbours, fewer at the ends."""
    ones = np.ones(WINDOW)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")


def draw(axes: Axes, rows: Sequence[dict[str, Any]], column: str, smoothed: bool) -> None:
    for run in task.POLICIES:
        curve = [row for row in rows if task.Run(row["pairs"], row.get("beta", 0.0), row.get("limit")) == run]
        if run.limit or not curve:  # a limit stops the run without it early; best-of-n has no beta
            continue
        kl, values = ([row[name] for row in curve] for name in ("kl", column))
        x, y = (smooth(kl), smooth(values)) if smoothed else (kl, values)
        label = run.name.replace("`", "")
        axes.plot(x, y, "--" if run.beta else "-", color=COLOURS[run.pairs], linewidth=1.6, label=label)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    settings: dict[str, Any] = {"svg.hashsalt": "trust", "svg.fonttype": "none", "font.size": 9}
    best, policies = (task.read(task.RESULTS / f"{name}.jsonl") for name in ("best_of_n", "policies"))
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(2, 2, figsize=(8.4, 5.6), sharex="col", layout="constrained")
        for column, (rows, title, smoothed) in enumerate(
            ((best, "Best of n", False), (policies, "GRPO", True))
        ):
            for line, (name, label) in enumerate((("proxy", "proxy, standard deviations"), ("gold", "gold"))):
                draw(axes[line, column], rows, name, smoothed)
                axes[line, column].set_ylabel(label)
            axes[0, column].set_title(title, loc="left")
            axes[1, column].set_xlabel("KL to the initial policy, nats per completion")
        axes[0, 1].legend(loc="lower right", frameon=False)
        figure.patch.set_facecolor("white")  # readable on a dark page too
        figure.savefig(FILE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
