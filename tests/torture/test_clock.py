"""The shifted clock: the day moves, also while a program runs, and waits and monotonic clocks do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torture import shim

PROGRAM = """
import queue, sys, time
before, began = time.time(), time.monotonic()
with open(sys.argv[1], "r+") as file:
    file.write("-7200".ljust(24))
try:
    queue.Queue().get(timeout=0.2)
except queue.Empty:
    print(before, time.time(), time.monotonic() - began)
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_clock_of_the_day_is_shifted(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("86400".ljust(24))
    env = {**os.environ, "LD_PRELOAD": str(shim.build()), "TORTURE_CLOCK": str(clock)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, clock], env=env, capture_output=True, text=True, check=True
    )
    before, after, waited = map(float, ended.stdout.split())
    assert before - time.time() == pytest.approx(86400, abs=60)
    assert after - time.time() == pytest.approx(-7200, abs=60)
    assert 0.2 <= waited < 60
