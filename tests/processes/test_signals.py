"""Signals at the moments of a pipeline that are not training: 75 where something is left to do, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAKE_TRAINERS = Path(__file__).parents[1] / "shared" / "fake_trainers.py"
INTERRUPTER = Path(__file__).parents[1] / "shared" / "interrupter.py"
LOADS = "import signal\nfrom rlhf_core import hookimpl\nsignal.raise_signal(signal.SIGHUP)\n"
LOADS += "@hookimpl\ndef rlhf_stage_start(stage): pass\n"


@pytest.fixture
def run(fake: ModuleType, pipeline: Path, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`rlhf run` of the chain of three, with a signal at an event of `interrupter.py`."""

    def call(interrupt: str = "none", *arguments: str) -> Any:
        monkeypatch.setenv("INTERRUPT", interrupt)
        given = ("--plugin", str(INTERRUPTER), "--plugin", str(FAKE_TRAINERS), "--dir", "run")
        return rlhf("run", "p.toml", *given, *arguments)

    return call


def state(stage: str) -> str:
    path = Path("run", stage, "stage.json")
    return str(json.loads(path.read_text())["state"]) if path.exists() else "new"


@pytest.mark.long
@pytest.mark.parametrize("event", ["saved", "end"])
def test_between_two_stages(run: Any, event: str) -> None:
    """What is being written is finished first: the model, and the record."""
    ended = run(f"SIGTERM base {event}")
    assert ended.code == 75
    announced, reason = ended.message.splitlines()
    assert announced == "stopping (SIGTERM): at the next safe point; Ctrl-C (SIGINT) stops now"
    assert (
        reason
        == "stopped by SIGTERM before stage 'rm' was begun; nothing is lost; rerun the same command to continue"
    )
    assert (state("base"), state("rm")) == ("done", "new")
    assert run().code == 0
    assert state("policy") == "done"


@pytest.mark.parametrize("event", [pytest.param("saved", marks=pytest.mark.long), "end"])
def test_in_the_last_stage_nothing_is_left_to_do(run: Any, event: str) -> None:
    assert run(f"SIGTERM policy {event}").code == 0
    assert state("policy") == "done"


def test_while_plugins_load(run: Any) -> None:
    Path("loads.py").write_text(LOADS)
    ended = run("none", "--plugin", "loads.py")
    assert ended.code == 75
    assert "stopped by SIGHUP before anything was trained" in ended.message
    assert not Path("run/base").exists()
    assert run().code == 0
