"""Time load_model on bfloat16 weights against what NumPy needs to read, cast and transpose the same files.

    python benchmarks/loading/run.py [--gigabytes 1] [--rounds 7]

Writes a llama of made-up weights to a temporary directory and has a process for each way of loading it. They take
turns, after each has loaded twice, so that all find the files in the page cache. Prints one JSON object last; of a
gigabyte, it is written to results/loading.json too. Exit code 1: the ratio is above the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import model

HERE = Path(__file__).resolve().parent
GOAL = 1.5
KINDS = ("load_model", "one pass", "three passes")


class Loader:
    """A process of loader.py, which loads on request."""

    def __init__(self, kind: str, directory: Path) -> None:
        command = [sys.executable, str(HERE / "loader.py"), kind, str(directory)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def load(self) -> dict[str, Any]:
        """{"seconds", "cpu_seconds", "peak_bytes"}"""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and every value."""
    out: dict[str, Any] = {}
    for name in ("seconds", "cpu_seconds"):
        values = [row[name] for row in rows]
        out[name] = {"median": round(statistics.median(values), 3), "runs": values}
    return {**out, "peak_mib": round(max(row["peak_bytes"] for row in rows) / 2**20)}


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Time them in turn; the first turn does not count."""
    loaders = {kind: Loader(kind, directory) for kind in KINDS}
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind, loader in loaders.items():
            row = loader.load()
            if number:
                rows[kind].append(row)
    for loader in loaders.values():
        loader.end()
    found = {kind: summary(each) for kind, each in rows.items()}
    ratios = {
        kind: {
            name: round(
                statistics.median(
                    ours[name] / theirs[name]
                    for ours, theirs in zip(rows["load_model"], rows[kind], strict=True)
                ),
                3,
            )
            for name in ("seconds", "cpu_seconds")
        }
        for kind in KINDS[1:]
    }
    return {"ratio": ratios, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading, against NumPy.")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-loading-") as temporary:
        facts = model.write(Path(temporary), arguments.gigabytes)
        found = measure(Path(temporary), arguments.rounds)
    result = {
        "ok": found["ratio"]["one pass"]["seconds"] <= GOAL,
        "goal": GOAL,
        "rounds": arguments.rounds,
        "cores": os.cpu_count(),
        **facts,
        "versions": {
            **{name: version(name) for name in ("rlhf-core", "jax", "numpy", "ml_dtypes")},
            "python": ".".join(map(str, sys.version_info[:3])),
        },
        **found,
    }
    text = json.dumps(result)
    if arguments.gigabytes == 1:
        (HERE / "results" / "loading.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
