"""Signals that ask a run to stop: one request per process, after which the previous handlers are restored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
