"""Time our suite and its peers on one workload, in turn: A B C A B C …, each time in a new process.

    python benchmarks/speed/peers.py --work W1 [--model 50m] [--rounds 3] [--peers trl tunix]

The peers' interpreters are TRL_PYTHON and TUNIX_PYTHON; where these are not set, environments are made under `.bench/`.
Prints a table and, last, one JSON object, which is also appended to .bench/peers.jsonl; with --record to the file
results/peers.jsonl, which is part of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
import table
import works

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent.parent / ".bench"
PEERS = {"trl": set(works.WORKS), "tunix": {"W1", "W2", "W3", "W4", "W5"}}
"""What each does; Tunix has no reward trainer, and its W1 is its general trainer with a pairwise loss."""

Runs = dict[str, list[dict[str, Any]]]


def interpreter(peer: str) -> str:
    """The peer's Python, its environment made first where none is named."""
    if named := os.environ.get(f"{peer.upper()}_PYTHON"):
        return named
    python = ENVIRONMENTS / peer / "bin" / "python"
    done = ENVIRONMENTS / peer / "installed"
    wanted = (HERE / f"requirements-{peer}.txt").read_text()
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENTS / peer)], check=True)
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "-r",
            str(HERE / f"requirements-{peer}.txt"),
        ]
        subprocess.run(install, check=True)
        done.write_text(wanted)
    return str(python)


def alternate(task: works.Task, peers: list[str], rounds: int) -> Runs:
    """Every round's row of each, in the order they ran."""
    commands = {"ours": [sys.executable, str(HERE / "ours.py"), "--one-process"]}
    commands |= {peer: [interpreter(peer), str(HERE / f"{peer}_runner.py")] for peer in peers}
    runs: Runs = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="speed-") as temporary:
        for number in range(rounds):
            for name, command in commands.items():
                # An epoch is timed as a first run has it; steps are not, so their programs are kept.
                kept = number if task.is_epoch else "kept"
                cache = {"JAX_COMPILATION_CACHE_DIR": str(Path(temporary) / f"{name}-{kept}")}
                row = machine.run([*command, *task.command], cache)
                runs[name].append(row)
                print(
                    f"round {number + 1} {name}: {statistics.median(row['seconds']):.3f} s", file=sys.stderr
                )
    return runs


def summary(task: works.Task, runs: Runs) -> dict[str, Any]:
    """Medians of all steps, and the median over the rounds of how many times as long a peer took as ours."""
    each = {name: [statistics.median(row["seconds"]) for row in rows] for name, rows in runs.items()}
    ratios = {
        name: statistics.median(peer / own for peer, own in zip(values, each["ours"], strict=True))
        for name, values in each.items()
        if name != "ours"
    }
    first = {name: [row["first_step"] for row in rows if row["first_step"]] for name, rows in runs.items()}
    return {
        "work": task.work,
        "model": task.size,
        "beta": task.beta,
        "rounds": len(runs["ours"]),
        "cores": os.cpu_count(),
        "seconds": {
            name: statistics.median([s for row in rows for s in row["seconds"]])
            for name, rows in runs.items()
        },
        "ratios": ratios,
        "fraction": statistics.median(row["fraction"] for row in runs["ours"]),
        "matmul_flops_per_second": {
            name: statistics.median(row["matmul_flops_per_second"] for row in rows)
            for name, rows in runs.items()
        },
        # The first process of each compiles; the later ones find what it left, where the library keeps it.
        "first_step_seconds": {
            name: {"first": values[0], "later": statistics.median(values[1:] or values)}
            for name, values in first.items()
            if values
        },
        "peak_rss_bytes": {name: max(row["peak_rss_bytes"] for row in rows) for name, rows in runs.items()},
        **(
            {"extra_bytes": {name: max(row["extra_bytes"] for row in rows) for name, rows in runs.items()}}
            if task.work == "W5"
            else {}
        ),
        "versions": {name: rows[-1]["versions"] for name, rows in runs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time our suite and its peers in turn.")
    works.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--record", action="store_true", help="append to the results in the repository")
    given = parser.parse_args()
    task = works.task_of(given)
    peers = [peer for peer in given.peers if task.work in PEERS[peer]]
    row = summary(task, alternate(task, peers, given.rounds))
    table.append(row, record=given.record)
    print(table.of_run(row))
    print(json.dumps(row))


if __name__ == "__main__":
    main()
