"""Write the tables of docs/results/learning.md, between their marks, from results/.

python benchmarks/learning/table.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import task

FILE = task.REPOSITORY / "docs/results/learning.md"
Row = Mapping[str, Any]


def interval(estimate: Sequence[float], sign: str = "") -> str:
    """Mean and half width of a 95 % interval, in percent."""
    mean, low, high = estimate
    return f"{100 * mean:{sign}.1f} ± {50 * (high - low):.1f}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def clipped(rows: Iterable[Row], loss: str, seed: int) -> str:
    """The last interval's, in percent; empty where the run logged none."""
    found = [row for row in rows if (row["loss"], row["seed"]) == (loss, seed)]
    value = max(found, key=lambda row: row["update"])["clipped"] if found else None
    return "" if value is None else f"{100 * value:.1f}"


def run(heldout: Sequence[Row], curves: Sequence[Row], trainer: str, loss: str, seed: int) -> list[str]:
    """The cells of one run, from its seed on."""
    measured = {(row["trainer"], row["loss"]): row for row in heldout if row["seed"] == seed}
    before, after = measured["none", None], measured.get((trainer, loss))
    if after is None:
        return [str(seed), interval(before["right"]), "not finished", "", "", "", ""]
    shares = [interval(row["right"]) for row in (before, after)]
    nats = [f"{after[name]:.3f}" for name in ("kl", "entropy")]
    return [str(seed), *shares, interval(after["gain"], "+"), *nats, clipped(curves, loss, seed)]


def main() -> None:
    heldout = task.read(task.RESULTS / "heldout.jsonl")
    ours, trl = (task.read(task.RESULTS / f"{name}.jsonl") for name in ("ours", "trl"))
    columns = ["seed", "before, %", "after, %", "gain, points", "KL", "entropy", "clipped, %"]
    tables = {
        "losses": table(
            ["loss", *columns],
            [
                [f"`{loss}`", *run(heldout, ours, "ours", loss, seed)]
                for loss in task.LOSSES
                for seed in task.SEEDS
            ],
        ),
        "trl": table(
            ["trainer", *columns],
            [
                [label, *run(heldout, rows, trainer, "dapo", seed)]
                for trainer, label, rows in (("ours", "rlhf-grpo", ours), ("trl", "TRL", trl))
                for seed in task.SEEDS
            ],
        ),
    }
    text = FILE.read_text("utf-8")
    for name, body in tables.items():
        start, stop = f"<!-- {name}: written by table.py -->", f"<!-- end of {name} -->"
        text = re.sub(f"{start}.*?{stop}", f"{start}\n\n{body}\n\n{stop}", text, flags=re.DOTALL)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
