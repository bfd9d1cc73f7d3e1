"""Divergences by others, and what `rlhf check` and `rlhf run` do with a pipeline that distils."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SKEWED = """
import jax.numpy as jnp
from rlhf_core import hookimpl
from rlhf_distill import DIVERGENCE

def total_variation(student_logps, teacher_logps, weight: float = 0.5):
    return weight * jnp.abs(jnp.exp(student_logps) - jnp.exp(teacher_logps))

@hookimpl
def rlhf_register(registry):
    registry.add(DIVERGENCE, "total_variation", total_variation)
"""
PIPELINE = """
dir = "run"
[[stage]]
name = "large"
trainer = "sft"
model = { hidden_size = 24, SIZES, tokenizer = "tokenizer" }
train_data = "rows.jsonl"
max_training_steps = 1
total_batch_size = 2
[[stage]]
name = "small"
trainer = "distill"
model = { hidden_size = 16, SIZES, tokenizer = "tokenizer" }
teacher_model = "large.model"
train_data = "rows.jsonl"
on_policy_fraction = 0.5
max_training_steps = 2
total_batch_size = 4
log_steps = 1
num_preview_samples = 0
max_completion_length = 4
divergence = { name = "total_variation", weight = 0.25 }
""".replace(
    "SIZES", 'model_type = "llama", num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 24'
)


@pytest.fixture
def pipeline(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny.make_tokenizer().save_pretrained("tokenizer")
    tiny.write_rows(tmp_path / "rows.jsonl", tiny.texts(6))
    (tmp_path / "mine.py").write_text(SKEWED)
    path = tmp_path / "p.toml"
    path.write_text(PIPELINE)
    return path


def test_a_divergence_of_ten_lines_is_checked(pipeline: Path, rlhf: Callable[..., Any]) -> None:
    checked = rlhf("check", str(pipeline), "--plugin", "mine.py")
    assert checked.code == 0, checked.message
    said = " ".join(checked.out.split())
    assert "a rollout is 2 prompts × 1 completion = 2" in said
    assert "6 texts: 6 kept; an update also takes 2 of these" in said
    assert "teacher" in said


@pytest.mark.long
def test_a_divergence_of_ten_lines_trains(pipeline: Path, rlhf: Callable[..., Any]) -> None:
    """Then a stage that is done, and whose file names another teacher, is refused."""
    done = rlhf("run", str(pipeline), "--plugin", "mine.py")
    assert done.code == 0, done.message
    again = rlhf("run", str(pipeline), "--plugin", "mine.py")
    assert "every stage is done" in again.message + again.out
    shutil.copytree("run/large/artifacts/model", "copy")
    Path("copy/rlhf_artifact.json").unlink()
    config = json.loads(Path("copy/config.json").read_text())
    Path("copy/config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    pipeline.write_text(pipeline.read_text().replace('"large.model"', '"copy"'))
    refused = rlhf("run", str(pipeline), "--plugin", "mine.py")
    assert refused.code == 2
    assert "stage 'small'.teacher_model: then" in refused.message
