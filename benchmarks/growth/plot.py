"""Draw results/growth.svg from results/growth.jsonl.

    python benchmarks/growth/plot.py

Needs matplotlib, as benchmarks/learning/plot.py does. The same results draw the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from cases import REPOSITORY
from tables import Row, plain_flops, read, sent, unshared_tokens

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FILE = REPOSITORY / "benchmarks/growth/results/growth.svg"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#888888"
LABELS = {"W1": ("reward step", BLUE, "o-"), "W2": ("GRPO update", ORANGE, "s--")}


def line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, colour: str, style: str) -> None:
    axes.plot(x, y, style, color=colour, linewidth=1.8, markersize=4, label=label)


def finish(axes: Axes, title: str, x: Sequence[float], label: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:,}" for value in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def per_token(axes: Axes, rows: Sequence[Row]) -> None:
    x = [row["length"] for row in rows]
    line(axes, x, [row["flops"] / row["tokens"] / 1e6 for row in rows], "counted", BLUE, "o-")
    line(axes, x, [plain_flops(row) / row["tokens"] / 1e6 for row in rows], "without attention", GREY, ":")
    finish(axes, "Reward step: MFLOP a token", x, "tokens a sequence")


def by_group(axes: Axes, rows: Sequence[Row]) -> None:
    x, first = [row["group"] for row in rows], rows[0]
    line(axes, x, [row["flops"] / first["flops"] for row in rows], "FLOPs", ORANGE, "s--")
    line(axes, x, [row["tokens"] / first["tokens"] for row in rows], "tokens, prompt shared", BLUE, "o-")
    repeated = [unshared_tokens(row) / unshared_tokens(first) for row in rows]
    line(axes, x, repeated, "tokens, prompt repeated", GREY, ":")
    finish(axes, "GRPO update, prompts of 1,024: times that of 2", x, "completions a prompt")


def by_devices(axes: Axes, rows: Sequence[Row], value: Any, title: str) -> None:
    for work, (label, colour, style) in LABELS.items():
        fsdp = [row for row in rows if row["work"] == work and row["data"] == row["tensor"] == 1]
        line(axes, [row["fsdp"] for row in fsdp], [value(row) for row in fsdp], label, colour, style)
    finish(axes, title, [1, 2, 4, 8], "devices, fsdp")


def main() -> None:
    found = read()
    settings: dict[str, Any] = {"svg.hashsalt": "growth", "svg.fonttype": "none", "font.size": 8}
    with mpl.rc_context(settings):
        figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(8.4, 5.6), layout="constrained")
        per_token(a, found["length"])
        by_group(b, found["group"])
        by_devices(c, found["devices"], lambda row: row["flops"] / 1e9, "GFLOP a device")
        by_devices(
            d, found["devices"], lambda row: sent(row) / 1e6, "MB a device gives or takes in collectives"
        )
        figure.patch.set_facecolor("white")  # readable on a dark page too
        figure.savefig(FILE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
