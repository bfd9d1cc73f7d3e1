"""Measure every case, one process each, and write results/growth.jsonl.

    python benchmarks/growth/run.py [--axis devices]

With --axis the other axes' results stay. Nothing is timed, so that other work may run beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import RESULTS, Case, cases

AXES = list(dict.fromkeys(case.axis for case in cases()))


def measured(case: Case) -> dict[str, Any]:
    command = [
        sys.executable,
        str(Path(__file__).with_name("measure.py")),
        json.dumps(dataclasses.asdict(case)),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axis", choices=AXES)
    asked = parser.parse_args().axis
    kept = RESULTS.read_text(encoding="utf-8").splitlines() if asked and RESULTS.exists() else []
    rows = [row for row in map(json.loads, kept) if row["axis"] != asked]
    for case in cases():
        if asked in (None, case.axis):
            rows.append(measured(case))
            print(case, file=sys.stderr)
            rows.sort(key=lambda row: AXES.index(row["axis"]))
            RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
