"""Teachers that cannot teach are refused, before anything is trained and by `rlhf check` already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_distill import DistillConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core import InputError
from rlhf_core.models import fresh_model


def tokenizer_of(words: list[str], **special: str) -> Any:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def swapped(words: list[str]) -> Any:
    return tokenizer_of([*words[:3], words[4], words[3], *words[5:]])


DIFFERENT: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "two ids swapped": (
        swapped,
        "token 'a' is 3 in the student's tokenizer and 4 in the teacher's",
    ),
    "fewer": (
        lambda words: tokenizer_of(words[:-1]),
        "token 'S' is 47 in the student's tokenizer and no token in the teacher's",
    ),
    "more": (
        lambda words: tokenizer_of([*words, "T"]),
        "token 'T' is 48 in the teacher's tokenizer and missing from the student's",
    ),
    "another stop token": (
        lambda words: tokenizer_of(words, eos_token="z"),
        "eos_token is '</s>' (1) in the student's tokenizer and 'z' (28) in the teacher's",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_another_tokenizer_is_refused_with_the_first_difference(
    tiny: ModuleType, teacher: Any, tmp_path: Path, case: str
) -> None:
    make, message = DIFFERENT[case]
    teacher.save(tmp_path / "other", tokenizer=make(tiny.WORDS))
    config = DistillConfig(teacher_model=str(tmp_path / "other"), max_training_steps=1)
    with pytest.raises(InputError) as refused:
        tiny.run(
            "distill",
            config,
            tmp_path / "run",
            model=tiny.make_model(seed=2, scale=3.0),
            train_dataset=tiny.prompts(4),
        )
    assert f"stage 'distill'.teacher_model: {message}: a divergence compares" in str(refused.value)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_missing_teacher_is_named(tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"teacher_model: missing; give a directory, a hub name or an ear"):
        tiny.run(
            "distill",
            DistillConfig(),
            tmp_path,
            model=tiny.make_model(seed=2, scale=3.0),
            train_dataset=tiny.prompts(4),
        )


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


def test_too_few_embeddings_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    small = fresh_model(tiny.SIZES, "lm", tokenizer=tokenizer_of(tiny.WORDS[:40]))
    small.save(tmp_path / "small", tokenizer=tiny.make_tokenizer())
    config = DistillConfig(teacher_model=str(tmp_path / "small"), max_training_steps=1)
    with pytest.raises(
        InputError, match=r"teacher_model: it has 40 embeddings, fewer than the tokenizer's 48 i"
    ):
        tiny.run(
            "distill",
            config,
            tmp_path,
            model=tiny.make_model(seed=2, scale=3.0),
            train_dataset=tiny.prompts(4),
        )


@pytest.mark.parametrize(("fraction", "size", "message"), [(0.1, 4, "rounds to 0"), (0.9, 4, "rounds to 4")])
def test_fractions_of_no_example_are_refused(fraction: float, size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DistillConfig(on_policy_fraction=fraction, total_batch_size=size)


def test_fractions_are_counted() -> None:
    config = DistillConfig(on_policy_fraction=0.25, total_batch_size=32)
    assert (config.sampled_per_update, config.given_per_update) == (8, 24)
