"""Train with both suites in turn, each in a process of its own that has the machine to itself.

    python benchmarks/smollm2/run.py TRL_PYTHON [--work grpo reward]

TRL_PYTHON: the interpreter of TRL's environment. Appends to results/runs.jsonl; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import task

FILE = task.RESULTS / "runs.jsonl"


def trained(python: str, script: str, work: str, name: str) -> dict[str, Any]:
    """Return the row that a script prints last, with the peak memory of its process in MiB."""
    directory = task.RUNS / f"{work}-{name}"
    shutil.rmtree(directory, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as cache:  # programs are compiled anew
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
        command = [python, str(task.HERE / script), work, str(directory)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            *_, last = process.stdout
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{script} ended with exit code {process.returncode}")
    return {"work": work, "trainer": name, **json.loads(last), "peak_mib": round(usage.ru_maxrss / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with both.")
    parser.add_argument("trl_python")
    parser.add_argument("--work", nargs="+", choices=task.WORKS, default=task.WORKS)
    arguments = parser.parse_args()
    done = {(row["work"], row["trainer"]) for row in task.read(FILE)}
    for work in arguments.work:
        for name, python, script in (
            ("ours", sys.executable, "ours.py"),
            ("trl", arguments.trl_python, "trl_runner.py"),
        ):
            if (work, name) not in done:
                task.append(FILE, [trained(python, script, work, name)])


if __name__ == "__main__":
    main()
