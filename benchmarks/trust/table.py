"""Write the tables of docs/results/reward_benchmark.md about trust, between their marks, from results/.

python benchmarks/trust/table.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import task

FILE = task.REPOSITORY / "docs/results/reward_benchmark.md"
SHOWN = (1, 2, 8, 32)
"""Of n."""
SPANS = ((1, 1), (4, 5), (7, 8), (11, 12), (15, 16))
"""Updates that a cell averages over, first and last."""

Row = Mapping[str, Any]


def cell(row: Row) -> str:
    return f"{row['proxy']:+.2f}; {100 * row['gold']:.1f}; {100 * row['right']:.1f}"


def best_of_n(rows: Sequence[Row]) -> list[list[str]]:
    by = {(row["pairs"], row["n"]): row for row in rows}
    head = ["pairs", *(f"n = {n}, KL {by[task.PAIRS[0], n]['kl']:.2f}" for n in SHOWN)]
    return [head, *([str(size), *(cell(by[size, n]) for n in SHOWN)] for size in task.PAIRS)]


def policies(rows: Sequence[Row]) -> list[list[str]]:
    heads = (f"update {first}" if first == last else f"updates {first}, {last}" for first, last in SPANS)
    lines = [["policy", *heads]]
    for run in task.POLICIES:
        curve = [row for row in rows if task.Run.of(row) == run]
        cells = []
        for first, last in SPANS:
            span = [row for row in curve if first <= row["update"] <= last]
            names = ("proxy", "gold", "right", "kl")
            means = {name: fmean(row[name] for row in span) for name in names} if span else None
            cells.append(f"{cell(means)}; {round(means['kl'], 1) + 0.0:.1f}" if means else "stopped")
        lines.append([run.name, *cells])
    return lines


def table(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (lines[0], rule, *lines[1:]))


def main() -> None:
    tables = {
        "best of n": best_of_n(task.read(task.RESULTS / "best_of_n.jsonl")),
        "policies": policies(task.read(task.RESULTS / "policies.jsonl")),
    }
    text = FILE.read_text("utf-8")
    for name, lines in tables.items():
        start, stop = f"<!-- {name}: written by table.py -->", f"<!-- end of {name} -->"
        text = re.sub(f"{start}.*?{stop}", f"{start}\n\n{table(lines)}\n\n{stop}", text, flags=re.DOTALL)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
