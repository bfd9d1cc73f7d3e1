"""Processes of one job that were given different things are refused, all of them, before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.shared import processes

FAKE = Path(__file__).parents[1] / "shared" / "fake_trainers.py"
PIPELINE = """
[[stage]]
name = "base"
trainer = "fake"
model = { model_type = "llama" }
train_data = "train.jsonl"
[[stage]]
name = "rm"
trainer = "fake_rm"
model = "base.model"
"""
COMMAND = """
import sys
from rlhf_core.cli import main
sys.argv = ["rlhf", *arguments]
main()
"""
ALONE = """
import json
from rlhf_core.errors import InputError
from rlhf_sft import SFTConfig, SFTTrainer
config, rows = map(json.loads, arguments)
try:
    SFTTrainer(SFTConfig(**config), model="nothing/here", train_dataset=rows).train()
except InputError as error:
    print("refused:", error)
"""


def both(program: str, directory: Path, *arguments: list[str]) -> list[tuple[int, str]]:
    """(exit code, what was said) of two processes, each with its arguments."""
    port = processes.free_port()
    running = [
        processes.start(program, i, 2, port, *each, devices=1, cwd=directory)
        for i, each in enumerate(arguments)
    ]
    try:
        said = ["".join(each.communicate(timeout=120)) for each in running]
    finally:
        for each in running:
            each.kill()
    return [(each.returncode, text) for each, text in zip(running, said, strict=True)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "p.toml").write_text(PIPELINE)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "other.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "q.toml").write_text(PIPELINE.replace("train.jsonl", "other.jsonl"))
    return tmp_path


def arguments(pipeline: str = "p.toml", *more: str, dir: str = "run") -> list[str]:
    return ["run", pipeline, "--plugin", str(FAKE), "--dir", dir, *more]


def one_message(ended: list[tuple[int, str]], *said: str) -> None:
    """Both processes end with 2, and between them they say everything, in one message."""
    assert [code for code, _ in ended] == [2, 2], ended
    whole = " ".join(" ".join(text for _, text in ended).split())
    assert all(whole.count(part) == 1 for part in said), whole
    assert "Traceback" not in whole


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (arguments("p.toml", "--set", "rm.size=5"), "process 1: stage 'rm'.size is 5, and 3 on process 0"),
        pytest.param(arguments("q.toml"), "process 1: stage 'base'.train_data is ", marks=pytest.mark.long),
    ],
)
def test_who_differs_and_in_what_is_said_by_all(place: Path, second: list[str], said: str) -> None:
    one_message(both(COMMAND, place, arguments(), second), said)
    assert not (place / "run" / "base").exists()


def test_a_run_directory_that_is_not_shared_is_said(place: Path) -> None:
    soon = "from rlhf_core.runtime import directory_lock\ndirectory_lock.SHARED_SECONDS = 0.5"
    one_message(
        both(soon + COMMAND, place, arguments(dir="one"), arguments(dir="two")),
        "dir: process 1 does not find in",
        "give a run directory that all processes share",
    )
    assert not (place / "two").exists()


@pytest.mark.long
def test_a_run_directory_that_is_not_shared_is_said_of_a_finished_run(place: Path) -> None:
    (place / "two" / "base").mkdir(parents=True)
    ended = both(COMMAND, place, arguments(dir="one"), arguments(dir="one"))
    assert [code for code, _ in ended] == [0, 0], ended
    one_message(
        both(COMMAND, place, arguments(dir="one"), arguments(dir="two")),
        "dir: process 1 does not find in",
        "give a run directory that all processes share",
    )


def test_trainers_that_are_run_from_python_agree_too(tiny: ModuleType, tmp_path: Path) -> None:
    rows = json.dumps(tiny.texts(3))
    given = [
        [json.dumps({"learning_rate": rate, "save_directory": str(tmp_path / "run")}), rows]
        for rate in (0.1, 0.2)
    ]
    for _, text in both(ALONE, tmp_path, *given):
        assert "refused: process 1: stage 'sft'.learning_rate is 0.2, and 0.1 on process 0" in text
    other = [given[0], [given[0][0], json.dumps(tiny.texts(3, seed=1))]]
    for _, text in both(ALONE, tmp_path, *other):
        assert "refused: process 1: stage 'sft'.train_data" in text
