"""Divergences by others, and what `rlhf check` and `rlhf run` do with a pipeline that distils."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_distill import DIVERGENCE, DistillConfig
from rlhf_distill.objective import open_divergence

from rlhf_core import InputError, Registry

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


def test_checks_name_what_is_wrong(pipeline: Path, tiny: ModuleType, rlhf: Callable[..., Any]) -> None:
    text = pipeline.read_text().replace("total_variation", "jsd").replace("weight = 0.25", "beta = 2")
    pipeline.write_text(text.replace("large.model", "larg.model"))
    checked = rlhf("check", str(pipeline))
    assert checked.code == 2
    assert "stage 'small'.divergence.beta" in checked.message
    assert "no artifact 'larg.model' before this stage" in checked.message
    other = tiny.make_tokenizer()
    other.add_tokens(["new"])
    other.save_pretrained("other")
    pipeline.write_text(text.replace("beta = 2", "beta = 1").replace('"tokenizer" }', '"other" }', 1))
    checked = rlhf("check", str(pipeline))
    assert checked.code == 2
    assert "token 'new' is 48 in the teacher's tokenizer and missing from the student's" in checked.message


def summed(student_logps: Any, teacher_logps: Any) -> Any:
    return (teacher_logps - student_logps).sum(-1)


def broken(student_logps: Any, teacher_logps: Any) -> Any:
    raise KeyError("temperature")


@pytest.mark.parametrize(
    ("divergence", "message"),
    [
        (summed, r"'mine' returned shape \[3\] for \[3, 4\]; expected one term per id"),
        (broken, "'mine' raised KeyError: 'temperature'"),
    ],
    ids=["summed", "broken"],
)
def test_divergences_without_a_term_per_id_are_refused(divergence: Any, message: str, tmp_path: Path) -> None:
    from rlhf_testing.fixtures import a_stage

    registry, config = Registry(), DistillConfig(divergence={"name": "mine"})
    registry.add(DIVERGENCE, "mine", divergence)
    stage = a_stage(tmp_path)
    stage = type(stage)(**{**vars(stage), "registry": registry})
    with pytest.raises(InputError, match=message):
        open_divergence(config, stage)
