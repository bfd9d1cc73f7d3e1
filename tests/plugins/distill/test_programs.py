"""What `rlhf check --on` compiles: both models in one program, the teacher among what is held."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from rlhf_distill import DistillConfig
from rlhf_topologies.programs import built_programs

from rlhf_core import TRAINER, Stage, plugins
from rlhf_core.mesh import make_mesh
from rlhf_core.training import OnShapes


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
    host = plugins.load()
    stage = Stage(
        name="small",
        dir=directory / "run",
        seed=0,
        mesh=make_mesh(2, 2, 2),
        is_main=True,
        registry=host.registry,
        hook=host.hook,
    )
    context = OnShapes(config, stage, tokenizer=student.tokenizer)
    return built_programs(host.registry.get(TRAINER, "distill").build, context)


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
def test_a_forecast_counts_what_is_sampled_or_what_is_given(place: Any, rlhf: Any, fraction: float) -> None:
    changes = f"on_policy_fraction = {fraction}"
    place.settings("distill.toml", changes if fraction else f'{changes}\ntrain_data = "corpus.jsonl"')
    told = " ".join(rlhf("check", "distill.toml").out.split())
    assert ("8 completions, at most 32 sampled tokens" in told) == (fraction == 1)
    assert ("2 updates of 4 demonstrations" in told) == (fraction == 0)
    assert "an update also takes" not in told
    assert "teacher" in told
