"""Write the tables of docs/results/learning.md about SmolLM2, between their marks, from results/.

python benchmarks/smollm2/table.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import task

FILE = task.REPOSITORY / "docs/results/learning.md"
CURVE = {"grpo": "reward", "reward": "loss"}
LABELS = {"grpo": "mean reward", "reward": "mean loss"}
MEASURED = {"grpo": "held-out completions right, %", "reward": "held-out pairs in the right order, %"}
PARTS = 4
"""Of a run, over each of which its curve is averaged."""


def percent(row: Mapping[str, Any]) -> str:
    return f"{100 * row['value']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def lines(
    work: str, runs: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Return the cells of a work's rows: a name, ours, TRL's, and TRL's over ours."""
    ours, trl = (
        next(row for row in runs if (row["work"], row["trainer"]) == (work, name)) for name in ("ours", "trl")
    )
    measured = {row["model"]: row for row in heldout if row["work"] == work}
    rows = (
        [["before: " + MEASURED[work], *[percent(measured["before"])] * 2, ""]]
        if "before" in measured
        else []
    )
    rows.append(["after: " + MEASURED[work], percent(measured["ours"]), percent(measured["trl"]), ""])
    count = len(ours[CURVE[work]])
    for part in range(PARTS):
        span = slice(part * count // PARTS, (part + 1) * count // PARTS)
        means = [f"{fmean(row[CURVE[work]][span]):.3f}" for row in (ours, trl)]
        rows.append([f"{LABELS[work]}, updates {span.start + 1} to {span.stop}", *means, ""])
    figures = {
        "seconds per update, median": ("{:.1f}", lambda row: median(row["seconds"][task.FIRST - 1 :])),
        "seconds until the first update is over": ("{:.0f}", lambda row: row["until_first_update"]),
        "seconds in all": ("{:.0f}", lambda row: row["until_first_update"] + sum(row["seconds"])),
        "peak memory, GB": ("{:.1f}", lambda row: row["peak_mib"] * 2**20 / 1e9),
    }
    for name, (form, figure) in figures.items():
        a, b = figure(ours), figure(trl)
        rows.append([name, form.format(a), form.format(b), f"{b / a:.2f}"])
    return rows


def table(work: str) -> str:
    head = ["", {"grpo": "rlhf-grpo", "reward": "rlhf-reward"}[work], "TRL", "TRL / rlhf"]
    body = lines(work, task.read(task.RESULTS / "runs.jsonl"), task.read(task.RESULTS / "heldout.jsonl"))
    rule = ["---"] + ["---:"] * 3
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def main() -> None:
    text = FILE.read_text("utf-8")
    for work in dict.fromkeys(row["work"] for row in task.read(task.RESULTS / "runs.jsonl")):
        start, stop = f"<!-- smollm2 {work}: written by table.py -->", f"<!-- end of smollm2 {work} -->"
        text = re.sub(f"{start}.*?{stop}", f"{start}\n\n{table(work)}\n\n{stop}", text, flags=re.DOTALL)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
