"""Pipelines of fake trainers, fast and independent of the installed plugins; and short runs of the real ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.components import load_file

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
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "sft,reward,grpo")
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
