"""The trainer: the kit's properties, what an update trains on, its teacher, and that a student approaches it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rlhf_distill import DistillConfig

from rlhf_core import load_model
from rlhf_core.testing import MODEL_TABLE, check_trainer, texts, tokenizer
from tests.shared.compiled import LOWERED, compilations
from tests.shared.interrupts import interrupt
from tests.shared.short_runs import Watch

SHORT: dict[str, Any] = {
    "learning_rate": 1e-2,
    "max_training_steps": 6,
    "log_steps": 1,
    "total_batch_size": 4,
    "max_completion_length": 6,
}


@pytest.fixture(scope="module")
def kit_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhf_core.models import fresh_model

    path = tmp_path_factory.mktemp("kit")
    table = {**MODEL_TABLE, "hidden_size": 24, "num_hidden_layers": 1}
    fresh_model(table, "lm", tokenizer=tokenizer(), seed=3).save(path)
    return path


@pytest.mark.long
def test_a_stream_is_sampled_and_given_and_continues_with_the_same_bits(
    tiny: ModuleType, tmp_path: Path
) -> None:
    """Killed within a rollout that serves two updates; prompts and given rows are two readings of the stream."""
    tiny.make_model(seed=5).save(tmp_path / "teacher")

    def rows() -> Iterator[dict[str, Any]]:
        yield from tiny.texts(40)

    def run(at: str, *listeners: Any) -> dict[str, Any]:
        config = DistillConfig(
            **SHORT,
            teacher_model=str(tmp_path / "teacher"),
            on_policy_fraction=0.5,
            steps_per_generation=2,
            save_steps=1,
            shuffle_buffer=4,
        )
        given = {"model": tiny.make_model(scale=4.0), "train_dataset": rows, "listeners": listeners}
        return dict(tiny.leaves(load_model(tiny.run("distill", config, tmp_path / at, **given).path).params))

    straight = run("straight")
    with pytest.raises(KeyboardInterrupt):
        run("parts", interrupt(3))
    parts = run("parts")
    assert all(np.array_equal(parts[name], straight[name]) for name in straight)


@pytest.mark.long
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_the_kit_finds_nothing(kit_teacher: Path, fraction: float) -> None:
    """Interrupted after an odd and an even update, within rollouts that serve two: the same bits. And eight devices."""
    config = DistillConfig(
        teacher_model=str(kit_teacher),
        on_policy_fraction=fraction,
        steps_per_generation=2,
        sampling={"max_completion_length": 6},
        num_preview_samples=2,
    )
    check_trainer("distill", config, rows=texts())


def train(tiny: ModuleType, teacher: Path, directory: Path, **changes: Any) -> list[dict[str, float]]:
    watch = Watch()
    rows = changes.pop("rows", None) or tiny.texts(11)
    config = DistillConfig(teacher_model=str(teacher), **{**SHORT, **changes})
    tiny.run(
        "distill",
        config,
        directory,
        listeners=[watch],
        model=tiny.make_model(seed=2, scale=3.0),
        train_dataset=rows,
        eval_dataset=rows[:4],
    )
    return watch.rows


GIVEN = {"on_policy_fraction": 0.0, "max_training_steps": 1}


def test_an_equal_run_traces_nothing_again(tiny: ModuleType, teacher_path: Path, tmp_path: Path) -> None:
    with compilations(LOWERED) as traced:
        train(tiny, teacher_path, tmp_path / "first", **GIVEN)
    assert any("accumulate" in name for name in traced)
    with compilations(LOWERED) as traced:
        train(tiny, teacher_path, tmp_path / "second", **GIVEN)
    assert not traced


def test_conversations_are_prompts_up_to_their_last_reply(
    tiny: ModuleType, teacher_path: Path, tmp_path: Path
) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in tiny.texts(6)
    ]
    options = {"rows": rows, "on_policy_fraction": 0.5, "chat_template": "plain", "max_training_steps": 1}
    logged = train(tiny, teacher_path, tmp_path, **options)
    assert np.isfinite(logged[-1]["loss"])
    first = json.loads((tmp_path / "samples/update-000000.jsonl").read_text().splitlines()[0])
    assert [turn["role"] for turn in first["prompt"]] == ["user"]
    assert first["completion"][0]["role"] == "assistant"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fraction", "divergence", "top_k"),
    [
        pytest.param(1.0, {"name": "jsd", "beta": 0.5}, None, id="sampled"),
        pytest.param(0.0, {"name": "forward_kl"}, 8, id="given, top 8"),
    ],
)
def test_a_student_approaches_its_teacher(
    tiny: ModuleType, teacher_path: Path, tmp_path: Path, fraction: float, divergence: Any, top_k: int | None
) -> None:
    logged = train(
        tiny,
        teacher_path,
        tmp_path,
        on_policy_fraction=fraction,
        divergence=divergence,
        top_k=top_k,
        total_batch_size=16,
        max_training_steps=30,
        eval_on_start=True,
        log_steps=10,
        num_preview_samples=0,
    )
    before, after = logged[0]["eval_loss"], logged[-1]["eval_loss"]
    assert 0 <= after < 0.7 * before


@pytest.mark.long
def test_sampling_teaches_nothing_by_itself(tiny: ModuleType, tmp_path: Path) -> None:
    """A student that is its own teacher has loss and gradient 0, whatever it samples."""
    student = tiny.make_model(seed=2, scale=3.0)
    student.save(tmp_path / "teacher")
    logged = train(tiny, tmp_path / "teacher", tmp_path / "run", max_training_steps=1)
    assert logged[0]["loss"] == pytest.approx(0, abs=1e-6)
    assert logged[0]["grad_norm"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_the_student_s_previews(
    tiny: ModuleType, teacher_path: Path, tmp_path: Path, fraction: float
) -> None:
    shown = {"prompts": ["a b"], "every": 1, "max_new_tokens": 3}
    options = {"on_policy_fraction": fraction, "max_training_steps": 1, "num_preview_samples": 0}
    train(tiny, teacher_path, tmp_path, **options, previews=shown)
    files = sorted(tmp_path.glob("samples/preview-*"))
    assert [path.name for path in files] == ["preview-000000.jsonl", "preview-000001.jsonl"]
    assert all(json.loads(path.read_text())["length"] <= 3 for path in files)


def test_padded_vocabularies_are_one(tiny: ModuleType, teacher_path: Path, tmp_path: Path) -> None:
    """48 ids in the tokenizer and the teacher, 64 in the student."""
    student = tiny.make_model(vocab_size=64, num_hidden_layers=1)
    assert student.definition.vocab_size == 64
    config = DistillConfig(
        teacher_model=str(teacher_path),
        total_batch_size=4,
        max_training_steps=1,
        max_completion_length=4,
        num_preview_samples=0,
    )
    artifact = tiny.run("distill", config, tmp_path, model=student, train_dataset=tiny.prompts(4))
    assert artifact.kind == "language_model"


def test_fractions_are_counted() -> None:
    config = DistillConfig(on_policy_fraction=0.25, total_batch_size=32)
    assert (config.sampled_per_update, config.given_per_update) == (8, 24)
