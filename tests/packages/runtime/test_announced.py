"""A signal is answered as it arrives, also while the main thread is inside a computation that no handler can leave."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_core.runtime import signals

COMPUTES = """
import hashlib, sys
from rlhf_core.runtime import signals

with signals.stop_signals(stops="saving after this update", exits=True):
    print("computing", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))  # no Python runs, as in a compiled program
"""


@contextmanager
def computing(rounds: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", COMPUTES, str(rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "computing\n"
        yield child
        child.kill()


def answer(child: subprocess.Popen[str], number: signal.Signals) -> str:
    child.send_signal(number)
    assert child.stderr is not None
    return child.stderr.readline()


def test_a_second_ctrl_c_ends_a_process_that_computes() -> None:
    with computing(50_000_000) as child:
        again = "press Ctrl-C (send SIGINT) again"
        assert answer(child, signal.SIGINT) == f"stopping: saving after this update; {again} to stop now\n"
        time.sleep(0.35)  # two within 0.3 s are one press, passed on by a launcher
        assert answer(child, signal.SIGINT) == f"{signals.NOW}\n"
        assert child.wait(timeout=5) == 130


def test_sigterm_is_announced_once_and_under_its_name() -> None:
    with computing(500_000) as child:
        line = "stopping (SIGTERM): saving after this update; Ctrl-C (SIGINT) stops now\n"
        assert answer(child, signal.SIGTERM) == line
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=10) == ("", "")
        assert child.returncode == 0
