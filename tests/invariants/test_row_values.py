"""An evaluation writes each held-out row's own values: those that an evaluation of this row alone has."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest

from rlhf_core.mesh import make_mesh
from rlhf_core.runs import open_run

VALUES = {
    "sft": {"loss": "loss"},
    "reward": {"chosen": "chosen/mean", "rejected": "rejected/mean"},
    "dpo": {"chosen": "rewards/chosen", "rejected": "rewards/rejected"},
    "kto": {"reward": "rewards/chosen"},
}
"""{trainer: {value of a row: the metric that it is where the row is evaluated alone}}."""
ALONE = (0, 3)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("trainer", VALUES)
def test_a_row_has_the_values_of_an_evaluation_of_it_alone(
    trainer: str, devices: int, short: Any, tiny: ModuleType
) -> None:
    rows = tiny.pairs(5, seed=4) if trainer in ("reward", "dpo") else tiny.texts(5, seed=4)
    changes: dict[str, Any] = {"max_training_steps": 2, "evaluation_steps": 1, "eval_batch_size": 2}
    if trainer == "kto":
        rows = [{**row, "label": True} for row in rows]
        changes["loss"] = "apo_zero_unpaired"  # the other one needs two rows
    sets = {"every": rows, **{f"only{i}": [rows[i]] for i in ALONE}}
    inputs: dict[str, Any] = {"eval_dataset": sets, "mesh": make_mesh(devices=jax.devices()[:devices])}
    short.train(trainer, inputs=inputs, **changes)
    (stage,) = open_run(Path(short.directory) / trainer).stages
    assert list(stage.evaluations) == [1, 2]
    logged = {row["step"]: row for row in stage.metrics}
    for update, written in stage.evaluations.items():
        assert written["step"] == update
        assert written["metrics"] == {
            name: x for name, x in logged[update].items() if name.startswith("eval_")
        }
        every = [row for row in written["rows"] if row["set"] == "every"]
        assert [row["row"] for row in every] == [1, 2, 3, 4, 5]
        for value, metric in VALUES[trainer].items():
            for i in ALONE:
                alone = written["metrics"][f"eval_only{i}_{metric}"]
                assert every[i][value] == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_rows_of_several_files_name_theirs(short: Any, tiny: ModuleType) -> None:
    files = [tiny.write_rows(short.directory / f"{name}.jsonl", tiny.texts(2, seed=4)) for name in "ab"]
    short.train("sft", inputs={"eval_dataset": [str(file) for file in files]}, max_training_steps=1)
    (stage,) = open_run(short.directory / "sft").stages
    places = [(Path(row["file"]).name, row["row"]) for row in stage.evaluations[1]["rows"]]
    assert places == [("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2)]
