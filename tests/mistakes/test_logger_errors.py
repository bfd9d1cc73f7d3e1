"""Loggers and plugins whose hooks raise: one line that names them, and what is kept; options told by the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
    assert ended.code == 1
    assert ended.message.startswith(
        f"stage 'base': logger 'csv_file' raised OSError: the disk is on fire {place}"
    )
    assert len(ended.message.splitlines()) == 1
    if hook != "rlhf_stage_start":
        assert json.loads(Path("runs/a/base/metrics.jsonl").read_text())["loss"] == 0.5
    again = run(LOGGER.replace("HOOK", hook), "--set", "base.logger=[]")
    assert again.code == 0
    skipped = hook == "rlhf_stage_end"
    assert ended.message.endswith(
        "to continue after it." if skipped else "start the stage over if there is none."
    )
    assert ("stage 'base': done on" in again.out) == skipped


def test_a_plugin_that_raises_is_named(run: Command) -> None:
    ended = run(PLUGIN.replace("HOOK", "rlhf_step_end"))
    place = f"({Path('plugin.py').absolute()} line 5)"
    assert ended.code == 1
    assert ended.message.startswith(
        f"stage 'base': plugin 'plugin.py' raised IndexError: list index out of range {place} in rlhf_step_end. "
    )


def test_the_first_error_is_the_one_that_is_raised(run: Command) -> None:
    ended = run(PLUGIN.replace("HOOK", "rlhf_stage_end"), "--set", "base.fail=error")
    assert ended.message == "the fake trainer was told to fail"
    assert ended.warned.startswith("warning: stage 'base': plugin 'plugin.py' raised IndexError")
    assert ended.warned.endswith("in rlhf_stage_end")


@pytest.mark.parametrize(("failing", "name"), [(0, "'csv_file'"), (1, "'csv_file' (logger[1])")])
def test_of_two_loggers_of_one_class_the_one_that_raised_is_named(
    run: Command, failing: int, name: str
) -> None:
    source = LOGGER.replace("HOOK", "rlhf_step_end").replace(
        "raise OSError", "if self.columns == 7: raise OSError"
    )
    options = ["{ name='csv_file' }", "{ name='csv_file' }"]
    options[failing] = "{ name='csv_file', columns=7 }"
    ended = run(source, "--set", f"base.logger=[{', '.join(options)}]")
    assert ended.message.startswith(f"stage 'base': logger {name} raised OSError: the disk is on fire (")
