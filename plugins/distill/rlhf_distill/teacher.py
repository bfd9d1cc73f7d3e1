"""The teacher: how it is opened, and what its tokenizer must share with the student's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core import InputError

if TYPE_CHECKING:
    from rlhf_core import Stage
    from rlhf_core.models import Model
    from rlhf_core.training import Context
    from rlhf_distill.config import DistillConfig

SPECIAL = ("eos_token", "bos_token", "unk_token")
"""Special tokens that a text is read with; padding is not read."""
RETRAIN = (
    "a divergence compares the two models id by id; take a teacher of the student's family, or a student that was "
    "trained with the teacher's tokenizer"
)


def teacher_source(config: DistillConfig, stage: Stage) -> str:
    """Return the config's teacher. Raises InputError where it has none."""
    if config.teacher_model is None:
        raise InputError(
            f"stage '{stage.name}'.teacher_model: missing; give a directory, a hub name or an earlier STAGE.OUTPUT"
        )
    return config.teacher_model


def open_teacher(config: DistillConfig, context: Context, student: Model) -> Model:
    """Load the teacher, with its adapters merged.

    Raises InputError where teacher and student do not share a tokenizer.
    """
    stage = context.stage
    source = teacher_source(config, stage)
    context.say(f"loading the teacher {source}")
    context.check(check_teacher, config, context)
    teacher = context.other_model(
        source, dtype=config.dtype, verify=config.verify, revision=config.teacher_revision
    )
    context.compute(require_shared_ids, source, student, teacher, stage)
    return teacher


def require_shared_ids(source: str, student: Model, teacher: Model, stage: Stage) -> None:
    """Raise InputError where a teacher that was loaded cannot be compared with the student id by id."""
    if teacher.tokenizer is None:
        raise InputError(
            f"stage '{stage.name}'.teacher_model: {source!r} has no tokenizer files, so its ids cannot be "
            "compared with the student's; put tokenizer.json and tokenizer_config.json next to its config.json"
        )
    tokenizer: Any = student.tokenizer
    require_same_tokenizer(tokenizer, teacher.tokenizer, stage)
    needed = len(tokenizer)
    for name, model in (("model", student), ("teacher_model", teacher)):
        ids = model.definition.vocab_size
        if ids < needed:
            raise InputError(
                f"stage '{stage.name}'.{name}: it has {ids:,} embeddings, fewer than the tokenizer's {needed:,} ids"
            )


def check_teacher(config: DistillConfig, context: Context) -> None:
    """Raise InputError where the teacher is missing, or where local files show another tokenizer than the student's."""
    source = context.described_by(teacher_source(config, context.stage))
    if isinstance(source, dict):
        source = source.get("tokenizer")
    student = context.tokenizer
    if (
        student is None
        or not isinstance(source, str)
        or not (Path(source) / "tokenizer_config.json").is_file()
    ):
        return
    from transformers import AutoTokenizer

    require_same_tokenizer(
        student, AutoTokenizer.from_pretrained(source, local_files_only=True), context.stage
    )


def require_same_tokenizer(student: Any, teacher: Any, stage: Stage) -> None:
    """Raise InputError that names the first token, by the student's ids, that has another id in the teacher."""
    problem = _difference(student, teacher)
    if problem:
        raise InputError(f"stage '{stage.name}'.teacher_model: {problem}: {RETRAIN}")


def _difference(student: Any, teacher: Any) -> str | None:
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            other = f"{theirs[token]:,}" if token in theirs else "no token"
            return f"token {token!r} is {number:,} in the student's tokenizer and {other} in the teacher's"
    for token, number in sorted(theirs.items(), key=lambda item: item[1]):
        if token not in ours:
            return f"token {token!r} is {number:,} in the teacher's tokenizer and missing from the student's"
    for name in SPECIAL:
        mine, other = getattr(student, name), getattr(teacher, name)
        if mine != other:
            ids = [_described(token, ours) for token in (mine, other)]
            return f"{name} is {ids[0]} in the student's tokenizer and {ids[1]} in the teacher's"
    return None


def _described(token: str | None, vocabulary: dict[str, int]) -> str:
    return "missing" if token is None else f"{token!r} ({vocabulary.get(token, -1):,})"
