"""The tables of results/growth.jsonl into docs/results/benchmarks.md, between their marks.

python benchmarks/growth/tables.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cases import RESULTS, SPEED

sys.path.insert(0, str(SPEED))
from table import FILE, MIB, put, table

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
WORKS = {"W1": "reward step", "W2": "GRPO update"}
PASSES = {"W1": 3, "W2": 4}
"""Forward passes' worth of products: a backward pass takes two, the reference one."""


def read() -> dict[str, list[dict[str, Any]]]:
    """{axis: its rows}."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, RESULTS.read_text("utf-8").splitlines()):
        found.setdefault(row["axis"], []).append(row)
    return found


def plain_flops(row: Row) -> float:
    """Compute 2 · N · tokens per pass, N the parameters that multiply a token: 6 · N · tokens with gradients."""
    return 2.0 * PASSES[row["work"]] * row["matrix_parameters"] * row["tokens"]


def unshared_tokens(row: Row) -> int:
    return int(row["prompts"] * row["group"] * (row["prompt"] + row["completion"]))


def sent(row: Row) -> float:
    """Count bytes of all collectives, per device."""
    return float(sum(size for _, size in row["collectives"].values()))


def mesh(row: Row) -> str:
    axes = [f"{axis} {row[axis]}" for axis in ("data", "fsdp", "tensor") if row[axis] > 1]
    return ", ".join(axes) or "1 device"


def collectives(row: Row, kind: str) -> str:
    number, size = row["collectives"].get(kind, (0, 0))
    return f"{number:.0f}: {size / 1e6:,.0f}" if number else ""


FLOPS: Column = ("GFLOP", lambda row: f"{row['flops'] / 1e9:,.1f}")
PLAIN: Column = ("over 2 · N · tokens per pass", lambda row: f"{row['flops'] / plain_flops(row):.2f}")
BYTES: Column = ("GB read and written", lambda row: f"{row['bytes'] / 1e9:,.1f}")
TEMPORARY: Column = ("temporary MiB", lambda row: f"{row['temporary_bytes'] / MIB:,.0f}")
TOKENS: Column = ("tokens", lambda row: f"{row['tokens']:,}")

COLUMNS: Mapping[str, Sequence[Column]] = {
    "model": (
        ("model", lambda row: f"{row['model']}, {WORKS[row['work']]}"),
        ("parameters", lambda row: f"{row['parameters'] / 1e6:.1f}M"),
        FLOPS,
        PLAIN,
        BYTES,
        TEMPORARY,
    ),
    "length": (
        ("tokens per sequence", lambda row: f"{row['length']:,}"),
        TOKENS,
        ("micro-batches", lambda row: str(sum(number for *_, number in row["rows"]))),
        FLOPS,
        PLAIN,
        BYTES,
        TEMPORARY,
    ),
    "group": (
        ("completions per prompt", lambda row: str(row["group"])),
        TOKENS,
        ("tokens, prompts repeated", lambda row: f"{unshared_tokens(row):,}"),
        FLOPS,
        PLAIN,
        BYTES,
        TEMPORARY,
    ),
    "prompt": (
        ("tokens per prompt", lambda row: f"{row['prompt']:,}"),
        TOKENS,
        ("tokens, prompts repeated", lambda row: f"{unshared_tokens(row):,}"),
        FLOPS,
        PLAIN,
        BYTES,
        TEMPORARY,
    ),
    "devices": (
        ("mesh", lambda row: f"{WORKS[row['work']]}, {mesh(row)}"),
        FLOPS,
        BYTES,
        ("state MiB", lambda row: f"{row['argument_bytes'] / MIB:,.0f}"),
        TEMPORARY,
        ("all-gather: MB", lambda row: collectives(row, "all-gather")),
        ("all-reduce: MB", lambda row: collectives(row, "all-reduce")),
        ("others: MB", lambda row: others(row)),
    ),
}


def others(row: Row) -> str:
    rest = [row["collectives"][k] for k in row["collectives"] if k not in ("all-gather", "all-reduce")]
    number, size = (sum(each) for each in zip(*rest, strict=True)) if rest else (0, 0)
    return f"{number:.0f}: {size / 1e6:,.0f}" if number else ""


def main() -> None:
    bodies = {}
    for axis, rows in read().items():
        columns = COLUMNS[axis]
        lines = [[cell(row) for _, cell in columns] for row in rows]
        bodies[f"growth with {axis}"] = table([name for name, _ in columns], lines)
    put(bodies, FILE)


if __name__ == "__main__":
    main()
