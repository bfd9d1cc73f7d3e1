"""A stage is trained again from its journal."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rlhf_core import run_pipeline
from rlhf_core.errors import InputError
from rlhf_core.pipeline.replay import Replayed, _by_step, _metric_differences, replay
from rlhf_core.runs import Damaged, open_run

FILE = """
dir = "run"
[[stage]]
name = "policy"
trainer = "grpo"
model = "lm"
train_data = "prompts.jsonl"
rewards = ["length"]
total_batch_size = 8
num_generations = 4
max_completion_length = 6
max_training_steps = 2
learning_rate = 1e-2
num_preview_samples = 0
log_steps = 1
"""


def test_the_policy_is_trained_again_from_its_journal(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits; and where a rollout or the data were changed, the metrics and the weights are other ones."""
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save(tmp_path / "lm")
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(6))
    (tmp_path / "p.toml").write_text(FILE)
    run_pipeline(tmp_path / "p.toml")
    assert replay(tmp_path / "run") == Replayed("policy", 2, [], model=True)
    recorded = open_run(tmp_path / "run").stages[0]
    entries = list(recorded.rollouts())
    assert [entry.rollout.number for entry in entries] == recorded.rollout_numbers == [0, 1]
    assert entries[1].rollout.total.shape == (8,)
    first, second = sorted((tmp_path / "run" / "policy" / "journal").glob("rollout-*"))
    with zipfile.ZipFile(first) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    out = BytesIO()
    np.save(out, -np.load(BytesIO(contents["total.npy"])))
    with zipfile.ZipFile(first, "w") as file:
        for name, content in {**contents, "total.npy": out.getvalue()}.items():
            file.writestr(name, content)
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(6, seed=1))
    found = replay(tmp_path / "run")
    assert any(line.startswith("loss: first at update 1, ") for line in found.differences)
    assert found.differences[-1] == "model/model.safetensors: other weights"
    assert [line.partition(":")[0] for line in found.changes] == ["train_data"]
    first.unlink()
    second.unlink()
    with pytest.raises(InputError, match="no stage has a journal"):
        replay(tmp_path / "run")


@pytest.mark.long
def test_pairs_of_completions_are_trained_on_again_from_the_journal(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save(tmp_path / "lm")
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(6))
    (tmp_path / "p.toml").write_text(FILE.replace("grpo", "online_dpo"))
    run_pipeline(tmp_path / "p.toml")
    assert replay(tmp_path / "run") == Replayed("policy", 2, [], model=True)


@pytest.mark.parametrize(
    "line",
    [
        *(b"[]", b"null", b"7", b'{"loss": 1.0}', b'{"step": null}', b'{"step": [1]}', b'{"step": "1"}'),
        *(b'{"step": true}', b'{"step": 1', b"\xff", b"[" * 50_000, b'{"step": ' + b"9" * 5000 + b"}"),
    ],
)
def test_a_damaged_row_of_metrics_is_an_error_that_names_the_file(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(Damaged, match=r"metrics\.jsonl is damaged \(.*\): restore it, or delete it"):
        _by_step(open_run(tmp_path).stages[0])


@pytest.mark.parametrize("value", [b"1e999", b"NaN", b"null", b"[]", b'"x"', b"9" * 400])
def test_a_damaged_number_of_metrics_is_a_difference(value: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": ' + value + b"}\n")
    then = _by_step(open_run(tmp_path).stages[0])
    (found,) = _metric_differences(then, {1: {"step": 1, "loss": 0.5}})
    assert found.startswith("loss: first at update 1, ")
    assert found.endswith(" then, 0.5 now")
