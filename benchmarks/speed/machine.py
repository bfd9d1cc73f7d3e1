"""What the machine says: its rate in matrix products, a process's memory, and processes that are timed from outside."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PRODUCT = 2048
"""Side of the square matrices whose product is timed: 17 GFLOP, 16 MiB each."""
PRODUCTS = 9


def product_rate(multiply: Callable[[], None]) -> float:
    """Measure floating-point operations per second of `multiply`, one product of PRODUCT-sided matrices; the median."""
    times = []
    for number in range(PRODUCTS + 2):
        began = time.perf_counter()
        multiply()
        if number >= 2:
            times.append(time.perf_counter() - began)
    return 2.0 * PRODUCT**3 / float(np.median(times))


def peak_rss() -> int:
    """Bytes, of this process since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Extra:
    """Peak memory of what follows over what is there now, bytes; Linux only, 0 elsewhere."""

    def __init__(self) -> None:
        self.before = 0
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).malloc_trim(0)  # what an earlier step freed would hide what the next one takes
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _status("VmRSS")

    def read(self) -> int:
        return _status("VmHWM") - self.before if self.before else 0


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def run(command: Sequence[str], more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a process and return the JSON object it prints last.

    Its `first_step_at`, by the clock, becomes `first_step`: seconds from before the process was started.
    """
    began = time.time()
    done = subprocess.run(
        command, env={**os.environ, **(more or {})}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: ended with exit code {done.returncode}")
    row = json.loads(done.stdout.splitlines()[-1])
    at = row.pop("first_step_at", None)
    return {**row, "first_step": None if at is None else at - began}
