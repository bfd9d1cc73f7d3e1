"""Loggers and plugins whose hooks raise: one line that names them, and what is kept; options told by the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core import TrainerConfig, cli, hookimpl, plugins
from rlhf_core.errors import InputError, RunError
from rlhf_core.pipeline import plan, read
from rlhf_core.stage import execute
from rlhf_core.stage.execute import hook_errors_named

FAKE_TRAINERS = Path(__file__).parents[1] / "shared" / "fake_trainers.py"
HOOKS = ("rlhf_stage_start", "rlhf_step_end", "rlhf_artifact_saved", "rlhf_stage_end")
LOGGER = """
from dataclasses import dataclass
from rlhf_core import LOGGER, hookimpl

@dataclass(eq=False)
class Csv:
    columns: int = 1

    def __post_init__(self):
        if self.columns < 1:
            raise ValueError(f"columns: expected at least 1, got {self.columns}")

    @hookimpl(tryfirst=True)
    def HOOK(self):
        raise OSError("the disk is on fire")

@hookimpl
def rlhf_register(registry):
    registry.add(LOGGER, "csv_file", Csv)
"""
PLUGIN = "from rlhf_core import hookimpl\n\n@hookimpl\ndef HOOK():\n    return [][0]\n"
Command = Callable[..., Any]


@pytest.fixture
def run(fake: ModuleType, pipeline: Path, rlhf: Command) -> Command:
    """`rlhf run` of the chain with plugin.py; source: what is in that."""

    def call(source: str, *arguments: str) -> Any:
        Path("plugin.py").write_text(source)
        given = ("--plugin", "plugin.py", "--plugin", str(FAKE_TRAINERS), "--dir", "runs/a")
        return rlhf("run", "p.toml", *given, *arguments)

    return call


@pytest.mark.parametrize(
    "hook",
    [name if name == "rlhf_stage_end" else pytest.param(name, marks=pytest.mark.long) for name in HOOKS],
)
def test_a_logger_that_raises_is_named_and_costs_no_row(run: Command, hook: str) -> None:
    ended = run(LOGGER.replace("HOOK", hook), "--set", 'base.logger=["csv_file"]')
    place = f"({Path('plugin.py').absolute()} line 15) in {hook}. "
    assert ended.code == cli.FAILED
    assert ended.message.startswith(
        f"stage 'base': logger 'csv_file' raised OSError: the disk is on fire {place}"
    )
    assert len(ended.message.splitlines()) == 1
    if hook != "rlhf_stage_start":
        assert json.loads(Path("runs/a/base/metrics.jsonl").read_text())["loss"] == 0.5
    again = run(LOGGER.replace("HOOK", hook), "--set", "base.logger=[]")
    assert again.code == cli.DONE
    skipped = hook == "rlhf_stage_end"
    assert ended.message.endswith(
        "to continue after it." if skipped else "start the stage over if there is none."
    )
    assert ("stage 'base': done on" in again.out) == skipped


def test_a_plugin_that_raises_is_named(run: Command) -> None:
    ended = run(PLUGIN.replace("HOOK", "rlhf_step_end"))
    place = f"({Path('plugin.py').absolute()} line 5)"
    assert ended.code == cli.FAILED
    assert ended.message.startswith(
        f"stage 'base': plugin 'plugin.py' raised IndexError: list index out of range {place} in rlhf_step_end. "
    )


def test_the_first_error_is_the_one_that_is_raised(run: Command) -> None:
    ended = run(PLUGIN.replace("HOOK", "rlhf_stage_end"), "--set", "base.fail=error")
    assert ended.message == "the fake trainer was told to fail"
    assert ended.warned.startswith("warning: stage 'base': plugin 'plugin.py' raised IndexError")
    assert ended.warned.endswith("in rlhf_stage_end")


def test_two_loggers_of_one_class() -> None:
    class Second:
        def __init__(self, *, fails: bool) -> None:
            self.fails = fails

        @hookimpl
        def rlhf_step_end(self, step: int) -> None:
            if self.fails:
                raise KeyError(step)

    for failing in (0, 1):
        host = plugins.empty_host()
        for index in (0, 1):
            host.pm.register(Second(fails=index == failing), name=f"logger '{index}'")
        stage: Any = type("Stage", (), {"name": "base"})
        with (
            hook_errors_named(host.pm),
            pytest.raises(RunError, match=f"^stage 'base': logger '{failing}' raised KeyError: 7"),
        ):
            host.hook.rlhf_step_end(stage=stage, step=7, metrics={})
        with pytest.raises(KeyError):
            host.hook.rlhf_step_end(stage=stage, step=7, metrics={})


def test_a_logger_may_be_listed_twice(fake: ModuleType, tmp_path: Path) -> None:
    host = plugins.load(objects=[fake])
    stage: Any = type("Stage", (), {"registry": host.registry, "is_main": True})
    made = execute.make_loggers(TrainerConfig(logger=["jsonl", "jsonl"]), stage)
    assert list(made) == ["logger 'console'", "logger 'jsonl'", "logger 'jsonl' (logger[1])"]


def test_wrong_options_of_loggers_are_reported_by_the_plan(fake: ModuleType, pipeline: Path) -> None:
    Path("plugin.py").write_text(LOGGER.replace("HOOK", "rlhf_step_end"))
    wrong = '[{name="csv_file", columns=0}]'
    sets = (f"base.logger={wrong}", f"policy.logger={wrong}")
    host = plugins.load(objects=[fake], files=[Path("plugin.py")])
    with pytest.raises(InputError) as caught:
        plan(read(pipeline, sets=sets, dir="runs/a"), host)
    said = "logger[0]: logger 'csv_file': columns: expected at least 1, got 0"
    assert caught.value.problems == (f"stage 'base'.{said}", f"stage 'policy'.{said}")
