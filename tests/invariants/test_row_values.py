"""Rows have their own values: held-out ones those of an evaluation of this row alone, trained ones their losses."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.mesh import make_mesh
from rlhf_core.runs import open_run
from tests.shared.interrupts import interrupt

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


def losses(stage: Path) -> dict[int, tuple[list[int], np.ndarray]]:
    """Return {update: (numbers of rows, their losses)}."""
    found = {}
    for path in sorted((stage / "rows").iterdir()):
        with np.load(path) as file:
            assert (file["row"].dtype, file["value"].dtype) == (np.int64, np.float32)
            found[int(path.stem)] = (file["row"].tolist(), file["value"])
    return found


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("trainer", VALUES)
def test_losses_of_rows_are_those_of_their_updates(trainer: str, devices: int, short: Any) -> None:
    """Their mean is the loss, whatever the micro-batches, and a run that was broken off writes the same bytes."""
    mesh = {"inputs": {"mesh": make_mesh(devices=jax.devices()[:devices])}}
    size = 1 if trainer == "sft" and devices == 1 else 4
    changes = {
        "total_batch_size": size,
        "max_training_steps": 4,
        "log_steps": 1,
        "shuffle_train_dataset": False,
    }
    _, watch = short.train(trainer, at="whole", **mesh, **changes)
    found = losses(short.directory / "whole" / trainer)
    assert list(found) == [1, 2, 3, 4]
    for update, (rows, values) in found.items():
        first = (update - 1) * size
        assert rows == sorted((first + i) % len(short.rows[trainer]) + 1 for i in range(size))
        logged = next(row["loss"] for row in watch.rows if row["step"] == update)
        if trainer != "sft" or size == 1:  # a demonstration counts by its tokens
            assert values.mean(dtype=np.float64) == pytest.approx(logged, rel=1e-5)
    if devices == 2:
        return
    with pytest.raises(KeyboardInterrupt):
        short.train(trainer, at="broken", listeners=(interrupt(3),), save_steps=2, **mesh, **changes)
    assert 4 not in losses(short.directory / "broken" / trainer)
    short.train(trainer, at="broken", save_steps=2, **mesh, **changes)
    for update in found:
        name = f"{trainer}/rows/{update:06d}.npz"
        assert (short.directory / "broken" / name).read_bytes() == (
            short.directory / "whole" / name
        ).read_bytes()


def test_rows_are_kept_at_logged_updates_and_in_the_last_epoch(short: Any, tiny: ModuleType) -> None:
    files = [tiny.write_rows(short.directory / f"{name}.jsonl", tiny.texts(4, seed=4)) for name in "ab"]
    inputs = {"train_dataset": [str(file) for file in files]}
    short.train(
        "sft", inputs=inputs, total_batch_size=4, num_train_epochs=3, max_training_steps=None, log_steps=3
    )
    found = losses(short.directory / "sft")
    assert list(found) == [3, 5, 6]
    with (
        np.load(short.directory / "sft/rows/000006.npz") as last,
        np.load(short.directory / "sft/rows/000005.npz") as before,
    ):
        rows = [
            (Path(str(file["sources"][source])).name, int(row))
            for file in (before, last)
            for source, row in zip(file["source"], file["row"], strict=True)
        ]
    assert sorted(rows) == [(f"{name}.jsonl", number) for name in "ab" for number in range(1, 5)]
