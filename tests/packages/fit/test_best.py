"""Which evaluation is the best, when there is no hope of a better one, and what the trained model is made of."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rlhf_core import Stage, create_state
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.config import TrainerConfig
from rlhf_core.errors import InputError, RunError
from rlhf_core.fit.best import Best
from rlhf_core.state import TrainState


def best(directory: Path = Path(), **given: Any) -> Best:
    config = TrainerConfig(evaluation_steps=1, **given)
    return Best(config, Stage("rm", directory, 0, None, True, None, None))  # type: ignore[arg-type]


def seen(judge: Best, *values: float, name: str = "eval_accuracy") -> list[bool]:
    """Which of the evaluations after updates 1, 2, … were the best so far."""
    return [judge.compare(step, {name: value, "loss": -value}) for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("name", "greater", "improved"),
    [
        ("eval_accuracy", None, [True, True, False, False, True]),
        ("eval_accuracy", False, [True, False, True, False, False]),
        ("eval_loss", None, [True, False, True, False, False]),
        ("eval_calibration_error", None, [True, False, True, False, False]),
        ("eval_loss", True, [True, True, False, False, True]),
        ("eval_loss/value", None, [True, False, True, False, False]),
    ],
)
def test_which_is_better(name: str, greater: bool | None, improved: list[bool]) -> None:
    judge = best(metric_for_best_model=name, greater_is_better=greater)
    assert seen(judge, 0.5, 0.6, 0.4, 0.4, 0.7, name=name) == improved
    step = max(i for i, each in enumerate(improved, 1) if each)
    assert (judge.metric, judge.step, judge.bad) == (name, step, 5 - step)


def test_what_is_no_number_and_what_is_equal_are_no_better() -> None:
    judge = best(load_best_model_at_end=True)
    assert seen(judge, math.nan, 0.5, math.nan, 0.5) == [False, True, False, False]
    assert (judge.value, judge.step, judge.bad) == (0.5, 2, 2)


def test_patience_counts_evaluations_since_the_best() -> None:
    judge = best(early_stopping_patience=2)
    ended = []
    for step, value in enumerate((0.5, 0.4, 0.6, 0.6, 0.5), 1):
        judge.compare(step, {"eval_accuracy": value})
        ended.append(judge.exhausted)
    assert ended == [False, False, False, False, True]


def test_nobody_asked_nothing_is_compared() -> None:
    judge = best()
    assert seen(judge, 0.5, 0.6) == [False, False]
    assert not judge.exhausted
    assert (judge.step, judge.value) == (None, None)


@pytest.mark.parametrize(
    ("asked", "reported", "found"),
    [
        (None, ["eval_loss", "eval_reward", "eval_accuracy"], "eval_accuracy"),
        (None, ["eval_loss", "eval_reward"], "eval_reward"),
        (None, ["eval_loss"], "eval_loss"),
        ("auc", ["eval_loss", "eval_auc"], "eval_auc"),
        ("eval_auc", ["eval_loss", "eval_auc"], "eval_auc"),
    ],
)
def test_the_metric_that_is_compared(asked: str | None, reported: list[str], found: str) -> None:
    judge = best(load_best_model_at_end=True, metric_for_best_model=asked)
    assert judge.choose_metric(dict.fromkeys(["loss", *reported], 1.0)) == found


def test_a_metric_that_is_not_reported() -> None:
    metrics = {"loss": 1.0, "eval_loss": 1.0, "eval_accuracy": 1.0}
    with pytest.raises(InputError) as caught:
        best(metric_for_best_model="eval_acuracy").compare(1, metrics)
    assert caught.value.problems == (
        "stage 'rm'.metric_for_best_model: the evaluation does not report eval_acuracy. "
        "Did you mean 'eval_accuracy'? It reports: eval_loss, eval_accuracy",
    )
    with pytest.raises(InputError, match="does not report eval_accuracy or eval_reward or eval_loss"):
        best(load_best_model_at_end=True).compare(1, {"eval_kl": 1.0})


def test_early_stopping_survives_a_restart() -> None:
    judge = best(early_stopping_patience=3)
    seen(judge, 0.5, 0.4, 0.3)
    other = best(early_stopping_patience=3)
    other.restore(json.loads(json.dumps(judge.to_json())))
    assert other.to_json() == judge.to_json()
    other.compare(4, {"eval_accuracy": 0.4})
    assert other.exhausted


# What the trained model is made of


@pytest.fixture
def kept(tiny: ModuleType, tmp_path: Path) -> Any:
    """States after updates 1, 2 and 3 whose parameters are multiplied by them; the first two are checkpoints."""
    model = tiny.make_model("score", scale=4.0)
    before = tiny.leaves(model.params)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)

    def state(step: int) -> TrainState:
        return create_state(model.with_params(jax.tree.map(lambda x: step * x, model.params)), optax.sgd(0.1))

    checkpoints.save(1, state(1), host={"step": 1, "metrics": {"eval_accuracy": 0.9, "loss": None}})
    checkpoints.save(2, state(2), host={"step": 2}, protect=1, block=True)
    yield SimpleNamespace(directory=tmp_path, before=before, checkpoints=checkpoints, state=state)
    checkpoints.close()


def judged(directory: Path, **given: Any) -> Best:
    judge = best(directory, **given)
    seen(judge, 0.9, 0.5, 0.4)
    return judge


def test_the_best_state_takes_the_place_of_the_last(
    kept: Any, tiny: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = judged(kept.directory, load_best_model_at_end=True, early_stopping_patience=2)
    last = kept.state(3)
    judge.stage.metrics.update({"eval_accuracy": 0.4, "loss": 0.1, "later": 1.0})
    found = judge.final(last, 3, kept.checkpoints)
    assert str(judge.stage.metrics) == "{'eval_accuracy': 0.9, 'loss': nan}"  # of the model that is kept
    for name, leaf in tiny.leaves(found.params).items():
        np.testing.assert_array_equal(leaf, kept.before[name])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(last.params))  # there is room for one
    assert json.loads((kept.directory / "best.json").read_text()) == {
        "metric": "eval_accuracy",
        "value": 0.9,
        "step": 1,
        "bad": 2,
        "updates": 3,
        "model": 1,
    }
    assert capsys.readouterr().err.splitlines() == [
        "[rm] stopped early after update 3: eval_accuracy has not improved in 2 evaluations",
        "[rm] best eval_accuracy: 0.9 after update 1; the trained model is that of update 1",
    ]


def test_the_last_state_stays_where_it_is_the_best_or_none_is_or_only_stopping_was_asked_for(
    kept: Any,
) -> None:
    last = kept.state(3)
    for values in ((0.1, 0.2, 0.3), (math.nan,) * 3):
        judge = best(kept.directory, load_best_model_at_end=True)
        seen(judge, *values)
        assert judge.final(last, 3, kept.checkpoints) is last
    judge = judged(kept.directory, early_stopping_patience=2)
    assert judge.final(last, 3, kept.checkpoints) is last
    record = json.loads((kept.directory / "best.json").read_text())
    assert (record["step"], record["model"]) == (1, 3)


def test_a_best_state_that_is_damaged_is_one_clear_error(kept: Any) -> None:
    for file in (kept.directory / "checkpoints" / "1" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    judge = judged(kept.directory, load_best_model_at_end=True)
    with pytest.raises(RunError) as caught:
        judge.final(kept.state(3), 3, kept.checkpoints)
    assert re.fullmatch(
        r"stage 'rm': the best evaluation was that after update 1, but the checkpoint of step 1 is damaged: "
        r"\S+/1/state/\S+ is missing or its size has changed since it was written\. "
        r"Delete \S+ to train it again\.",
        str(caught.value),
    )
    assert kept.checkpoints.steps() == [1, 2]


def logged(directory: Path, *values: float, name: str = "eval_loss", first: int = 1) -> None:
    """Write a metrics.jsonl of evaluations after updates first, first + 1, …"""
    rows = ({"step": step, "eval_accuracy": 0.5, name: value} for step, value in enumerate(values, first))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "values", "line"),
    [
        (
            "eval_loss",
            (0.96, 0.9, 1.6),
            "eval_loss was best after update 2, 0.9, and is 1.6 after update 3, whose model is saved: "
            'load_best_model_at_end = true and metric_for_best_model = "eval_loss" would keep the best',
        ),
        ("eval_loss", (0.96, 0.9, 0.92), None),
        ("eval_loss", (1.6, 1.2, 0.9), None),
        (
            "eval_accuracy",
            (0.9, 0.95, 0.8),
            "eval_accuracy was best after update 2, 0.95, and is 0.8 after update 3, whose model is saved: "
            "load_best_model_at_end = true would keep the best",
        ),
        ("eval_accuracy", (0.9, 0.95, 0.92), None),
        ("eval_loss", (0.9, "0.9", [0.9], 10**400, 0.92), None),
    ],
)
def test_evaluations_that_got_clearly_worse_are_told_at_the_end(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    values: tuple[float, ...],
    line: str | None,
) -> None:
    logged(tmp_path, *values, name=name)
    best(tmp_path).final(None, 3, None)  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == ([f"[rm] {line}"] if line else [])


@pytest.mark.parametrize("first", [0, 1])
def test_whether_the_start_was_a_candidate_is_told(
    kept: Any, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    logged(kept.directory, 0.5, 0.9, 0.7, name="eval_accuracy", first=first)
    judge = best(kept.directory, load_best_model_at_end=True)
    seen(judge, 0.5, 0.7, 0.9)
    judge.final(kept.state(3), 3, kept.checkpoints)
    without = "" if first == 0 else "; the start was not evaluated: eval_on_start"
    assert capsys.readouterr().err.splitlines() == [
        f"[rm] best eval_accuracy: 0.9 after update 3; the trained model is that of update 3{without}"
    ]


# Retention


@pytest.mark.parametrize(("keep", "steps"), [(1, [2, 5]), (2, [2, 4, 5])])
def test_the_best_stays_beside_the_newest(tmp_path: Path, keep: int, steps: list[int]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step, protected in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        checkpoints.save(step, {"x": jax.numpy.ones(2) * step}, host={}, protect=protected, block=True)
    assert checkpoints.steps() == steps
    checkpoints.save(6, {"x": jax.numpy.ones(2)}, host={}, protect=6, block=True)
    assert 2 not in checkpoints.steps()  # it is the best no more
    found = checkpoints.restore({"x": jax.ShapeDtypeStruct((2,), np.float32)}, step=6)
    assert found is not None
    assert found.step == 6
    checkpoints.close()
