"""Write the tables of docs/results/reward_benchmark.md, between their marks, from results/.

python benchmarks/reward/table.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import task

FILE = task.REPOSITORY / "docs/results/reward_benchmark.md"
JUDGES = {
    "longer": "the longer solution",
    "untrained": "untrained head, mean",
    "ours": "rlhf-reward",
    "trl": "TRL",
}
DIFFERENCES = {
    "ours - longer": "rlhf-reward less the longer solution",
    "ours - trl": "rlhf-reward less TRL",
}
RUNS = {
    "ours, first run": "rlhf-reward, first run",
    "ours, later runs": "rlhf-reward, later runs",
    "trl": "TRL",
}
Row = Mapping[str, Any]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def interval(row: Row, sign: str = "") -> str:
    """Mean and half width of a 95 % interval, in percent."""
    mean, low, high = row["accuracy"]
    return f"{100 * mean:{sign}.1f} ± {50 * (high - low):.1f}"


def spread_of(row: Row) -> str:
    low, high = row["spread"]
    return f"{100 * low:.1f} to {100 * high:.1f}"


def accuracy(rows: Sequence[Row]) -> str:
    found = {(row["judge"], row["seed"]): row for row in rows}
    lines = []
    for judge, label in JUDGES.items():
        mine = [found[judge, seed] for seed in (*task.SEEDS, None) if (judge, seed) in found]
        if mine:
            extra = [f"{mine[-1]['auc']:.3f}", f"{mine[-1]['length_correlation']:+.2f}"]
            lines.append([label, *map(interval, mine), *extra])
            if mine[-1]["spread"]:
                lines.append(["one untrained head", *map(spread_of, mine), "", ""])
    for judge, label in DIFFERENCES.items():
        if (judge, None) in found:
            lines.append([label, *[""] * len(task.SEEDS), interval(found[judge, None], "+"), "", ""])
    seeds = [f"seed {seed}, %" for seed in task.SEEDS]
    return table(["preferred by", *seeds, "all, %", "AUC", "length corr."], lines)


def speed(rows: Sequence[Row]) -> str:
    """Means over rounds; in brackets the least and the largest."""
    lines = []
    for run, label in RUNS.items():
        mine = [row for row in rows if row["run"] == run]
        if mine:
            columns = (
                ([row["seconds"] for row in mine], ".1f"),
                ([row["startup_seconds"] for row in mine], ".1f"),
                ([row["tokens"] / row["seconds"] for row in mine], ",.0f"),
                ([row["steady_tokens"] / row["steady_seconds"] for row in mine], ",.0f"),
                ([row["peak_mib"] for row in mine], ",.0f"),
            )
            lines.append([label, *(spread(values, form) for values, form in columns)])
    head = ["", "wall time, s", "start-up, s", "tokens/s, all", "tokens/s, steady", "peak memory, MiB"]
    return table(head, lines)


def spread(values: Sequence[float], form: str) -> str:
    return f"{sum(values) / len(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def trial(rows: Sequence[Row]) -> str:
    epochs = sorted({row["epoch"] for row in rows})
    found = {(row["learning_rate"], row["epoch"]): row for row in rows}
    lines = [
        [f"{rate:g}"]
        + [
            f"{100 * row['accuracy']:.1f}, {row['loss']:.3f}" if (row := found.get((rate, epoch))) else ""
            for epoch in epochs
        ]
        for rate in sorted({row["learning_rate"] for row in rows})
    ]
    return table(["learning rate", *(f"epoch {epoch}" for epoch in epochs)], lines)


def main() -> None:
    text = FILE.read_text("utf-8")
    for name, body in {
        "accuracy": accuracy(task.read(task.RESULTS / "heldout.jsonl")),
        "speed": speed(task.read(task.RESULTS / "speed.jsonl")),
        "trial": trial(task.read(task.RESULTS / "trial.jsonl")),
    }.items():
        start, stop = f"<!-- {name}: written by table.py -->", f"<!-- end of {name} -->"
        text = re.sub(f"{start}.*?{stop}", f"{start}\n\n{body}\n\n{stop}", text, flags=re.DOTALL)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
