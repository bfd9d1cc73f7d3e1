"""What `rlhf check --on` compiles: both models in one program, the teacher among what is held."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from rlhf_distill import DistillConfig
from rlhf_distill.train import build
from rlhf_testing.fixtures import a_stage
from rlhf_topologies.programs import built_programs

from rlhf_core.mesh import make_mesh
from rlhf_core.runtime.peak_memory import format_bytes
from rlhf_core.training.define import forecast


def described(tiny: ModuleType, teacher: Path, directory: Path, **changes: Any) -> Any:
    student = tiny.make_model(seed=2, scale=3.0)
    student.save(directory / "student")
    rows = tiny.write_rows(directory / "rows.jsonl", tiny.texts(16))
    config = DistillConfig(
        model=str(directory / "student"),
        teacher_model=str(teacher),
        train_data=str(rows),
        total_batch_size=8,
        max_completion_length=6,
        **changes,
    )
    inputs = {"tokenizer": student.tokenizer}
    return built_programs(build, config, a_stage(directory / "run", mesh=make_mesh(2, 2, 2), inputs=inputs))


@pytest.mark.parametrize(
    ("fraction", "work"),
    [
        pytest.param(1.0, {"train", "update", "sample", "read"}, marks=pytest.mark.long),
        (0.5, {"train", "update", "sample", "read"}),
        (0.0, {"train", "update"}),
    ],
)
def test_programs_compile_from_shapes(
    tiny: ModuleType, teacher: Any, teacher_path: Path, tmp_path: Path, fraction: float, work: set[str]
) -> None:
    made = described(tiny, teacher_path, tmp_path, on_policy_fraction=fraction)
    assert made.note is None
    assert {"train", "update"} <= {each.work for each in made.programs} <= work
    assert any(each.work == "sample" for each in made.programs) == (fraction > 0)
    frozen = jax.tree.leaves(made.resident["frozen parameters"])
    assert sum(x.size for x in frozen) == sum(x.size for x in jax.tree.leaves(teacher.params))
    trained = [each for each in made.programs if each.work == "train"]
    assert any("given" in each.name for each in trained) == (fraction == 0.5)
    for each in trained[-1:]:
        assert each.lower().compile().memory_analysis() is not None


def test_a_teacher_that_is_not_here_is_not_compiled(tiny: ModuleType, tmp_path: Path) -> None:
    made = described(tiny, Path("someone/large"), tmp_path)
    assert made.programs == ()
    assert made.note == "not compiled: its model or tokenizer is not on this machine yet"


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_forecast_counts_what_is_sampled_or_what_is_given(
    tiny: ModuleType, teacher: Any, teacher_path: Path, tmp_path: Path, fraction: float
) -> None:
    config = DistillConfig(
        model=tiny.SIZES,
        teacher_model=str(teacher_path),
        total_batch_size=8,
        on_policy_fraction=fraction,
        max_completion_length=6,
    )
    inputs = {"tokenizer": tiny.make_tokenizer(), "train_dataset": tiny.texts(16)}
    lines = forecast(build, config, a_stage(tmp_path, inputs=inputs)).lines
    assert ("16 completions, at most 96 sampled tokens" in lines) == (fraction == 1)
    assert ("2 updates of 8 demonstrations, 1.00 epochs" in lines) == (fraction == 0)
    assert not any("an update also takes" in line for line in lines)
    held = format_bytes(sum(x.nbytes for x in jax.tree.leaves(teacher.params)))
    assert f"teacher {held}" in lines[-1]
