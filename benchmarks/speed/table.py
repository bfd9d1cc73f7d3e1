"""The tables of the peers' runs: results/peers.jsonl into docs/results/benchmarks.md, between its marks.

python benchmarks/speed/table.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "peers.jsonl"
LOCAL = HERE.parent.parent / ".bench" / "peers.jsonl"
FILE = HERE.parent.parent / "docs/results/benchmarks.md"
NAMES = {"ours": "rlhf", "trl": "TRL", "tunix": "Tunix"}
MIB = 2**20

Row = Mapping[str, Any]


def append(row: Row, *, record: bool) -> None:
    """Keep a run's row: with `record` among the results that the pages show, else beside the peers' environments."""
    path = RESULTS if record else LOCAL
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def label(row: Row) -> str:
    return (
        f"{row['work']}{'' if row['beta'] or row['work'] not in ('W2', 'W4') else ', beta 0'}, {row['model']}"
    )


def of_run(row: Row) -> str:
    """One run: a line for each library."""

    def line(name: str) -> list[str]:
        first = row["first_step_seconds"].get(name)
        return [
            NAMES[name],
            f"{row['seconds'][name]:.3f}",
            f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "1",
            f"{first['first']:.1f}, {first['later']:.1f}" if first else "",
            f"{row['peak_rss_bytes'][name] / MIB:.0f}",
            f"{row['extra_bytes'][name] / MIB:.0f}" if "extra_bytes" in row else "",
        ]

    head = [label(row), "seconds", "times rlhf", "first step: cold, again, s", "peak MiB", "extra MiB"]
    return table(head, [line(name) for name in row["seconds"]])


def seconds(rows: Sequence[Row]) -> str:
    """All works: seconds of each library, and ours against the fastest of the others."""

    def line(row: Row) -> list[str]:
        cells = [f"{row['seconds'][name]:.3f}" if name in row["seconds"] else "" for name in NAMES]
        best = f"{min(row['ratios'].values()):.2f} ×" if row["ratios"] else ""
        return [label(row), *cells, best, f"{row['fraction']:.2f}", str(row["rounds"])]

    head = ["work", *NAMES.values(), "against the fastest", "share of the matrix product", "rounds"]
    return table(head, map(line, rows))


def memory(rows: Sequence[Row]) -> str:
    """Peak memory of the processes, MiB, and for W5 the peak over the state."""

    def cells(row: Row, key: str) -> list[str]:
        return [f"{row[key][name] / MIB:.0f}" if name in row[key] else "" for name in NAMES]

    lines = [[label(row), *cells(row, "peak_rss_bytes")] for row in rows]
    lines += [
        [f"{label(row)}, over the state", *cells(row, "extra_bytes")] for row in rows if "extra_bytes" in row
    ]
    return table(["work, MiB", *NAMES.values()], lines)


def first_step(rows: Sequence[Row]) -> str:
    """Show seconds from the start of a process to the end of its first step: the first process, and later ones."""

    def cell(row: Row, name: str) -> str:
        found = row["first_step_seconds"].get(name)
        return f"{found['first']:.1f}, {found['later']:.1f}" if found else ""

    lines = [[label(row), *(cell(row, name) for name in NAMES)] for row in rows if row["first_step_seconds"]]
    return table(["work, s", *NAMES.values()], lines)


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last run of every work and model, in the order of their names, 10m first."""
    last = {label(row): row for row in rows}
    return sorted(last.values(), key=lambda row: (row["model"], row["work"], -row["beta"]))


def put(bodies: Mapping[str, str], file: Path) -> None:
    """Write each body between the marks of its name."""
    text = file.read_text("utf-8")
    for name, body in bodies.items():
        start, stop = f"<!-- {name}: written by table.py -->", f"<!-- end of {name} -->"
        text = re.sub(
            f"{start}.*?{stop}",
            lambda _, b=body, a=start, z=stop: f"{a}\n\n{b}\n\n{z}",
            text,
            flags=re.DOTALL,
        )
    file.write_text(text, encoding="utf-8")


def main() -> None:
    rows = newest(map(json.loads, RESULTS.read_text("utf-8").splitlines()))
    put({"seconds": seconds(rows), "memory": memory(rows), "first step": first_step(rows)}, FILE)


if __name__ == "__main__":
    main()
