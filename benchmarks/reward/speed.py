"""Time both trainers in turn, each run in its own process with the machine to itself.

    python benchmarks/reward/speed.py TRL_PYTHON [--rounds 2]

TRL_PYTHON: the interpreter of TRL's environment. Appends to results/speed.jsonl. In each round ours runs twice: with an
empty cache of compiled programs, and with what the first run left there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import task

FILE = task.RESULTS / "speed.jsonl"


def timed(python: str, script: str, directory: Path, cache: Path) -> dict[str, Any]:
    """The row that a script's --speed prints last, and its peak memory in MiB."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    command = [python, str(task.HERE / script), "--speed", str(directory)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        *_, last = process.stdout
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{script} ended with exit code {process.returncode}")
    return {**json.loads(last), "peak_mib": round(usage.ru_maxrss / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time both trainers.")
    parser.add_argument("trl_python")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="reward-speed-") as temporary:
            place = Path(temporary)
            for name, python, script in (
                ("ours, first run", sys.executable, "ours.py"),
                ("trl", arguments.trl_python, "trl_runner.py"),
                ("ours, later runs", sys.executable, "ours.py"),
            ):
                found = timed(python, script, place / name, place / "cache")
                task.append(FILE, [{"run": name, "round": number, **found}])
                print(json.dumps({"run": name, "round": number, **found}))


if __name__ == "__main__":
    main()
