"""docs/how-to/resume.md: its loop goes on after a stop, its messages are said, its tables are the code's."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core.fit.progress import DEFAULT_SAVE_MINUTES
from rlhf_core.stage.spec import LENGTH, MAY_CHANGE, UNCOMPARED
from tests.shared import documents

PAGE = documents.REPOSITORY / "docs/how-to/resume.md"
PIPELINE = """
dir = "runs"
[[stage]]
name = "base"
trainer = "sft"
model = "MODEL"
train_data = "corpus.jsonl"
learning_rate = 0.01
total_batch_size = 4
max_training_steps = 4
save_steps = 2
log_steps = 1
"""
# Stopped after update 3 the first time; the second time the checkpoint of that update has lost a byte.
RLHF = """#!/bin/bash
newest=runs/base/checkpoints/3/host.json
if [ -e $newest ]; then
    truncate --size=-1 $newest
    export INTERRUPT=none
fi
exec {python} -m rlhf_core.cli "$@" --plugin {plugin}
"""


@pytest.fixture
def place(tmp_path: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save(tmp_path / "MODEL")
    tiny.write_rows(tmp_path / "corpus.jsonl", tiny.texts(8))
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/rlhf"
    command.write_text(
        RLHF.format(python=sys.executable, plugin=Path(__file__).parents[1] / "shared" / "interrupter.py")
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@pytest.mark.long
def test_the_page_can_be_followed(place: Path) -> None:
    blocks = documents.blocks(PAGE)
    (script,) = [text for language, text in blocks if language == "bash"]
    damaged, refused = [text for language, text in blocks if language == "text"]
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    stop = {"PATH": path, "INTERRUPT": "SIGTERM base step 3", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **stop}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "stopped after update 3 of 4, state saved" in done.stderr
    documents.shows(damaged, done.stderr)
    assert json.loads((place / "runs/base/plan.json").read_text())["start"] == 2
    first, changed, longer = [
        line for language, text in blocks if language == "console" for line in documents.commands(text)
    ]
    assert "nothing to run" in documents.type_in(first).said
    ended = documents.type_in(changed)
    assert ended.code == 2
    documents.shows(refused, ended.said)
    ended = documents.type_in(longer)
    assert ended.code == 0, ended.said
    assert "is trained further" in ended.said
    assert json.loads((place / "runs/base/plan.json").read_text())["updates"] == 6
    steps = [
        json.loads(line)["step"] for line in (place / "runs/base/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_the_table_of_what_is_compared_is_complete() -> None:
    text = PAGE.read_text(encoding="utf-8").split("## What is compared")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| (\w[\w ]*) \| (.*) \|", text, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows["ignored"])) >= UNCOMPARED - {"use_wandb"}  # an entry of `logger`
    assert set(re.findall(r"`([\w.]+)`", rows["warned of"])) >= MAY_CHANGE
    assert set(LENGTH) <= MAY_CHANGE
    refused = set(re.findall(r"`(\w+)`", rows["refused"]))
    assert not refused & (UNCOMPARED | MAY_CHANGE)


def test_codes_and_defaults_are_the_commands() -> None:
    text = PAGE.read_text(encoding="utf-8")
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert codes == [0, 1, 2, 75, 128 + signal.SIGINT, 128 + signal.SIGKILL]
    assert f"| `save_interval_minutes` | {DEFAULT_SAVE_MINUTES:g}, " in text
