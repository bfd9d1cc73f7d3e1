"""A secret given to a component appears in no file that a run writes and in nothing that it prints."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.shared import documents, processes, report_runs

PLUGIN = """
from dataclasses import dataclass
import json
from pydantic import SecretStr
from rlhf_core import LOGGER, TRAINER, Trainer, TrainerConfig, artifacts, hookimpl
from rlhf_core.errors import RunError

@dataclass
class Sink:
    pin: SecretStr
    api_key: str
    url: str

    @hookimpl
    def rlhf_step_end(self, step, metrics):
        with open("seen.txt", "a") as file:  # outside of the run directory
            file.write(f"{self.pin.get_secret_value()} {self.api_key} {self.url}\\n")

class Config(TrainerConfig):
    fail: bool = False

class Weights:
    tokenizer = None

    def save(self, path):
        path.mkdir(parents=True)
        (path / "weights.txt").write_text("x")

def run(config, stage):
    stage.hook.rlhf_step_end(stage=stage, step=1, metrics={"loss": 0.5})
    if config.fail:
        raise RunError("the service refused key canary-env-2 at canary-typed-1")
    artifacts.save_model(stage, "model", "language_model", Weights())

@hookimpl
def rlhf_register(registry):
    registry.add(LOGGER, "sink", Sink)
    registry.add(TRAINER, "idle", Trainer(Config, {"model": "language_model"}, run))
"""
PIPELINE = """
dir = "run"
[[stage]]
name = "a"
trainer = "idle"
logger = [{ name = "sink", pin = "canary-typed-1", api_key = "canary-named-3", url = { env = "SINK_URL" } }]
"""
CANARIES = ("canary-typed-1", "canary-env-2", "canary-named-3")


@pytest.mark.parametrize("fail", [False, True])
def test_no_file_holds_a_secret(tmp_path: Path, fail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "p.toml").write_text(PIPELINE)
    command = ["run", "p.toml", "--plugin", "plugin.py", *(["--set", "a.fail=true"] if fail else [])]
    environment = {"SINK_URL": "canary-env-2", "WANDB_MODE": "disabled"}
    ended = processes.Process("from rlhf_core.cli import main; main()", command, tmp_path, environment)
    out, errors = ended.communicate(timeout=120)
    assert ended.returncode == (1 if fail else 0), errors
    assert (tmp_path / "seen.txt").read_text().split() == ["canary-typed-1", "canary-named-3", "canary-env-2"]
    written = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert tmp_path / "run/pipeline.resolved.toml" in written
    for canary in CANARIES:
        assert canary not in out + errors
        assert [path for path, content in written.items() if canary.encode() in content] == []
    if not fail:
        report = tmp_path / "run/report.html"
        assert documents.rlhf(["report", "run"]).code == 0
        told = report_runs.Report(report)
        assert any(stage["name"] == "a" for stage in told.run["stages"])
        assert not any(canary in told.html + told.text for canary in CANARIES)
        monkeypatch.setenv("SINK_URL", "canary-another-6")
        again = documents.rlhf(["run", "p.toml", "--plugin", "plugin.py"])
        assert again.code == 0  # a secret is no difference
    for name in ("run/pipeline.resolved.toml", *(["run/a/stage.json"] if not fail else [])):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
