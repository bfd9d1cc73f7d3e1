"""Pipelines of fake trainers, fast and independent of the installed plugins; and short runs of the real ones."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from rlhf_core import cli
from rlhf_core.plugins.component import load_file

FAKE_TRAINERS = Path(__file__).parent / "fake_trainers.py"
CHAIN = """
seed = 7
[[stage]]
name = "base"
trainer = "fake"
model = { model_type = "llama" }
train_data = "train.jsonl"
[[stage]]
name = "rm"
trainer = "fake_rm"
model = "base.model"
[[stage]]
name = "policy"
trainer = "fake"
model = "base.model"
seed = 3
rewards = [{ name = "fake_model", model = "rm.model" }]
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The fake trainers' module, in an empty current directory and without the installed trainers."""
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "sft,reward,grpo,dpo")
    monkeypatch.chdir(tmp_path)
    module: ModuleType = load_file(FAKE_TRAINERS)
    module.EVENTS.clear()
    return module


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A chain of three stages in p.toml, with its data."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "p.toml"
    path.write_text(CHAIN)
    return path


@pytest.fixture(scope="session")
def short_runs() -> ModuleType:
    return load_file(Path(__file__).parent / "short_runs.py")


@pytest.fixture(scope="module")
def shared_short(short_runs: ModuleType, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return short_runs.Short.of(tiny, tmp_path_factory.mktemp("short"))


@pytest.fixture
def short(shared_short: Any, tmp_path: Path) -> Any:
    """Runs of the three trainers in an empty directory; see short_runs.py."""
    return dataclasses.replace(shared_short, directory=tmp_path)


@pytest.fixture(scope="session")
def places() -> ModuleType:
    return load_file(Path(__file__).parent / "places.py")


@pytest.fixture(scope="session")
def good(places: ModuleType, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """{name: content} of everything that the pipelines of places.py name."""
    files: dict[str, bytes] = places.good_files(repository, tmp_path_factory.mktemp("good"))
    return files


@pytest.fixture
def place(places: ModuleType, good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The current directory, with everything that the pipelines name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # rewards.py changes faster than its time stamp
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command replaces it
    made = places.Place(tmp_path, good)
    made.restore()
    return made


class Ended(NamedTuple):
    code: int
    message: str
    """What stderr says, without progress and warnings."""
    warned: str
    out: str


@pytest.fixture
def rlhf(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command `rlhf` with these arguments, in this process."""

    def call(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["rlhf", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err, err
        lines = [line for line in err.splitlines() if not line.startswith("[")]
        warned = [line for line in lines if line.startswith("warning: ")]
        message = "\n".join(line for line in lines if line not in warned)
        return Ended(int(stop.value.code or 0), message, "\n".join(warned), out)

    return call
