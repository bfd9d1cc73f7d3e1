"""Teachers of padded vocabularies, and how many examples are the teacher's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from rlhf_distill import DistillConfig


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
