"""Signals that ask a run to stop: one request per process, after which the previous handlers are restored.

One is answered as it arrives, also while the main thread is inside a computation that no handler can leave.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core import data
from rlhf_core.errors import Stopped, reading
from rlhf_core.models import load_model
from rlhf_core.runtime import agreement, signals

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_stops_where_nothing_is_lost_only_if_it_was_asked_to() -> None:
    agreement.stop_together("before its first update")
    with signals.stop_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM before its first update; nothing is lost"):
            agreement.stop_together("before its first update")


@pytest.mark.parametrize("number", NUMBERS)
def test_each_asks_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in NUMBERS]
    with signals.stop_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
        signal.raise_signal(signal.SIGTERM)  # a second one changes nothing
        with pytest.raises(Stopped, match=f"stopped by {number.name} before it began; nothing is lost"):
            signals.stop_if_asked("before it began")
    assert [signal.getsignal(each) for each in NUMBERS] == before
    assert not signals.stop_requested()
    signals.stop_if_asked("afterwards")


def test_one_inside_another_is_the_same_request() -> None:
    with signals.stop_signals() as outer:
        handler = signal.getsignal(signal.SIGTERM)
        with signals.stop_signals(redeliver=True) as inner:
            assert inner is outer
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert outer.is_set()


def test_a_second_ctrl_c_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with signals.stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # passed on by a launcher: the same press
        assert stop.is_set()
        monkeypatch.setattr(signals, "SAME_PRESS_SECONDS", 0.0)
        time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_nohup_stays() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_set()


def test_a_handler_of_sigusr1_stays() -> None:
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    with signals.stop_signals() as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert not stop.is_set()
    assert came == [signal.SIGUSR1]


def test_a_signal_that_nothing_acted_on_is_sent_again() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    with signals.stop_signals(redeliver=True):
        signal.raise_signal(signal.SIGTERM)
        assert not came
    assert came == [signal.SIGTERM]


def test_a_signal_that_stopped_the_run_is_not_sent_again() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))

    @signals.stop_signals(redeliver=True)
    def run() -> None:
        signal.raise_signal(signal.SIGTERM)
        signals.stop_if_asked("here")

    with pytest.raises(Stopped):
        run()
    assert not came


def test_the_command_holds_them_before_it_imports_anything() -> None:
    code = (
        "import signal, sys; sys.argv = ['rlhf', 'run', 'no-such-file.toml']\n"
        "from rlhf_core import cli\n"
        "class First:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'jax': signal.raise_signal(signal.SIGTERM)\n"
        "sys.meta_path.insert(0, First())\n"
        "assert 'jax' not in sys.modules\n"
        "cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr.endswith(
        "stopped by SIGTERM before anything was trained; nothing is lost; rerun the same command to continue\n"
    )


def test_loading_a_model_or_data_stops(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make_model().save(tmp_path / "model")
    tiny.write_rows(tmp_path / "texts.jsonl", tiny.texts(3))
    with signals.stop_signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match=r"stopped by SIGTERM while .*model was read"):
            load_model(str(tmp_path / "model"), "lm")
        with pytest.raises(Stopped, match="stopped by SIGTERM while data was read"):
            data.load([{"text": "a"}])
        with pytest.raises(Stopped), reading("file"):
            signals.stop_if_asked("while a file was read")
    assert load_model(str(tmp_path / "model"), "lm").params


def test_cleaning_up_keeps_the_exit_code() -> None:
    program = """
import atexit, os, signal
from rlhf_core import cli
from rlhf_core.cli import exits
from rlhf_core.errors import Stopped
from rlhf_core.runtime.signals import stop_signals

def command():
    raise Stopped("stopped")

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    atexit.register(os.kill, os.getpid(), number)
with stop_signals():
    exits.run(command)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (75, "stopped\n")


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
