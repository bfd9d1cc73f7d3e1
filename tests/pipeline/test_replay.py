"""A stage is trained again from its journal."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rlhf_core.errors import InputError
from rlhf_core.pipeline import run_pipeline
from rlhf_core.pipeline.replay import Replayed, replay

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
