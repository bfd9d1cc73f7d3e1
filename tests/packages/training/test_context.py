"""Stages on a mesh whose axis `context` cuts rows: what they refuse, and that they train what one device does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_sft import SFTConfig

from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.pipeline.file import assemble

SHARED: dict[str, Any] = {
    "learning_rate": 1e-3,
    "optimizer": "sgd",
    "total_batch_size": 8,
    "max_training_steps": 2,
    "log_steps": 1,
}


def test_attention_of_whole_rows_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    config, mesh = SFTConfig(**SHARED, attention="xla"), make_mesh(-1, context=2)
    with pytest.raises(
        InputError, match=r"stage 'sft'.attention: 'xla' computes whole rows, which mesh.context cuts"
    ):
        tiny.run("sft", config, tmp_path, mesh=mesh, model=tiny.make_model(), train_dataset=tiny.texts(8))


def test_an_axis_has_one_size() -> None:
    def read(mesh: dict[str, int], *sets: str) -> Any:
        return assemble(
            {"mesh": mesh, "stage": [{"name": "a", "trainer": "sft"}]}, base=Path.cwd(), sets=sets
        )

    assert read({"sp": 4, "data": 2}).mesh == {"context": 4, "data": 2}
    assert read({"sp": 4}, "mesh.context=2").mesh == read({"context": 4}, "mesh.sp=2").mesh == {"context": 2}
    problems = read({"context": 4, "sp": 2}).problems
    assert "mesh.context: given twice, sp is another name of it; remove one" in problems
    assert make_mesh(context=4).shape["context"] == 4
