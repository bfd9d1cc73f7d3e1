"""Several losses of an update, each divided by its own count over all micro-batches, splits and devices.

And a loss over padded batches: declared arrays, parts of a batch, and a program per value of the objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_core import create_state
from rlhf_core.fit import evaluator
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import Mean, fetch_metrics
from rlhf_core.plugins import load_file
from rlhf_core.step import Programs, split_step
from rlhf_core.training import PaddedObjective
from tests.shared.compiled import compilations

sharing: Any = load_file(Path(__file__).parents[2] / "shared" / "sharing.py")
RATE = 0.1
DRAW = np.random.default_rng(4)
ROWS, WIDTH = 24, 3


def data() -> dict[str, np.ndarray]:
    """Rows whose weights differ much between the losses, and between micro-batches; some have none at all."""
    x = DRAW.normal(size=(ROWS, WIDTH)).astype(np.float32)
    policy = np.where(np.arange(ROWS) < 8, 3.0, 0.5).astype(np.float32)
    value = np.where(np.arange(ROWS) < 16, 0.0, np.arange(ROWS)).astype(np.float32)
    return {"x": x, "y": DRAW.normal(size=ROWS).astype(np.float32), "policy": policy, "value": value}


BATCH = data()
START = DRAW.normal(size=WIDTH).astype(np.float32)


def objective(params: Any, batch: Mapping[str, Any]) -> tuple[dict[str, Mean], dict[str, Any]]:
    out = batch["x"] @ params["w"]
    errors = jnp.square(out - batch["y"])
    losses = {
        "policy": Mean.of(jnp.sin(out), batch["policy"]),
        "value": Mean.of(0.5 * errors, batch["value"]),
    }
    return losses, {"out": Mean.of(out)}


def expected() -> tuple[np.ndarray, dict[str, float]]:
    """The gradient and the losses by their formulas, float64."""
    x, y, policy, value = (BATCH[name].astype(np.float64) for name in ("x", "y", "policy", "value"))
    out = x @ START.astype(np.float64)
    gradient = (policy * np.cos(out)) @ x / policy.sum() + (value * (out - y)) @ x / value.sum()
    parts = {
        "loss/policy": (policy * np.sin(out)).sum() / policy.sum(),
        "loss/value": (value * 0.5 * (out - y) ** 2).sum() / value.sum(),
    }
    return gradient, {**parts, "loss": sum(parts.values())}


def state_on(tiny: Any, devices: int) -> Any:
    mesh = make_mesh(devices=jax.devices()[:devices])
    model = replace(tiny.make_model(), mesh=mesh, params={"w": jnp.copy(START)})
    placed = jax.device_put(model.params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    return create_state(replace(model, params=placed), optax.sgd(RATE))


def require_expected(state: Any, metrics: Mapping[str, Any]) -> None:
    gradient, losses = expected()
    np.testing.assert_allclose((START - np.asarray(state.params["w"])) / RATE, gradient, rtol=2e-5, atol=2e-6)
    logged = fetch_metrics(metrics)
    for name, value in losses.items():
        assert logged[name] == pytest.approx(value, rel=1e-5)
    assert logged["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)


def parts(sizes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    ends = np.cumsum(sizes)[:-1]
    split = {name: np.split(x, ends) for name, x in BATCH.items()}
    return [{name: each[i] for name, each in split.items()} for i in range(len(sizes))]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("from_zero", "ahead"), [(False, False), (True, True)])
def test_uneven_micro_batches(devices: int, from_zero: bool, ahead: bool, tiny: Any) -> None:
    state = state_on(tiny, devices)
    programs, batches = Programs(objective, state, from_zero=from_zero), parts((2, 8, 14))
    if ahead:
        programs.compile(state, [(batch, i > 0) for i, batch in enumerate(batches)])
        programs.wait()
    with compilations() as compiled:
        done, counts = None, programs.count(state, batches)
        assert counts is not None
        for number, batch in enumerate(batches):
            done = programs.accumulate(state, put_rows(state.step.sharding.mesh, batch), done, number, counts)
    assert done is not None
    names = {"jit(_accumulate)", "jit(accumulate_parts)", "jit(count)"}
    assert ahead == names.isdisjoint(compiled), compiled
    require_expected(*programs.apply(state, done))


def test_a_micro_batch_that_is_the_whole_update_needs_no_counts(tiny: Any) -> None:
    """Of two devices, each has half of the rows, and divides by the count of both."""
    state = state_on(tiny, 2)
    programs = Programs(objective, state)
    done = programs.accumulate(state, put_rows(state.step.sharding.mesh, BATCH), None)
    require_expected(*programs.apply(state, done))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_equal_splits_inside_one_program(splits: int, tiny: Any) -> None:
    state = state_on(tiny, 1)
    require_expected(*jax.jit(lambda s, b: split_step(objective, s, b, splits))(state, BATCH))


def test_a_loss_without_a_count_is_zero(tiny: Any) -> None:
    state = state_on(tiny, 1)
    batch = {**BATCH, "value": np.zeros(ROWS, np.float32)}
    programs = Programs(objective, state)
    counts = programs.count(state, [batch])
    following, metrics = programs.apply(state, programs.accumulate(state, batch, None, 0, counts))
    logged = fetch_metrics(metrics)
    assert logged["loss/value"] == 0
    assert logged["loss"] == logged["loss/policy"]
    assert np.isfinite(np.asarray(following.params["w"])).all()


def test_a_part_that_is_not_finite_stops_the_update(tiny: Any) -> None:
    state = state_on(tiny, 1)
    y = BATCH["y"].copy()
    y[-1] = np.inf
    programs, batch = Programs(objective, state), {**BATCH, "y": y}
    counts = programs.count(state, [batch])
    following, _ = programs.apply(state, programs.accumulate(state, batch, None, 0, counts))
    assert int(following.guard) == 0
    np.testing.assert_array_equal(following.params["w"], START)


def test_counting_reads_no_parameters(tiny: Any) -> None:
    """It costs a sum over the weights, not a forward pass."""
    state = state_on(tiny, 1)
    text = Programs(objective, state)._count.lower(state.params, BATCH).compile().as_text()
    assert "dot(" not in text


def test_one_loss_needs_no_counts(tiny: Any) -> None:
    state = state_on(tiny, 1)
    programs = Programs(lambda params, batch: (objective(params, batch)[0]["policy"], {}), state)
    assert programs.count(state, [BATCH]) is None


TRACED: list[str] = []


def noted(params: Any, batch: Mapping[str, Any]) -> tuple[Mean, dict[str, Any]]:
    TRACED.append("objective")
    return objective(params, batch)[0]["policy"], {}


@pytest.mark.parametrize("devices", [1, 2])
def test_an_objective_is_traced_once_for_all_micro_batches_of_an_update(devices: int, tiny: Any) -> None:
    sharing.forget()
    TRACED.clear()
    state = state_on(tiny, devices)
    programs = Programs(noted, state)
    for follows in (False, True):
        programs.lower(state, BATCH, follows)
    assert TRACED == ["objective"]


def test_evaluation_adds_them_up(tiny: Any) -> None:
    state = state_on(tiny, 1)
    batches: Any = parts((2, 8, 14))
    found = evaluator(objective, state.step.sharding.mesh, lambda: batches)(state)
    for name, value in expected()[1].items():
        assert found[name] == pytest.approx(value, rel=1e-5)


traced: list[Any] = []


@dataclass(frozen=True)
class Squares(PaddedObjective):
    """Mean of (score − target)² · scale."""

    ids = ("input_ids", "attention_mask")
    numbers = ("target",)
    optional = ("weight", "scale")
    power: float = 2.0

    def compute(self, model: Any, params: Any, batch: Any) -> Any:
        traced.append(batch)
        scores = model.padded_scores(params, batch["input_ids"], batch["attention_mask"])
        errors = abs(scores - batch["target"]) ** self.power * batch.get("scale", 1.0)
        return Mean.of(errors, batch.get("weight")), {"score": Mean.of(scores)}


def make_batch(**more: Any) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    mask = (np.arange(7) < draw.integers(1, 8, 6)[:, None]).astype(np.int64)
    return {
        "input_ids": draw.integers(3, 30, (6, 7)),
        "attention_mask": mask,
        "target": draw.normal(size=6),
        "names": ["not", "an", "array"],
        **more,
    }


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.long), 3])
def test_an_update_is_the_gradient_of_the_mean_over_the_whole_batch(tiny: ModuleType, splits: int) -> None:
    model = tiny.make_model("score", scale=4.0)
    batch = make_batch(weight=np.array([1, 0, 2, 1, 0, 0]), scale=np.float32(0.5))
    weight = batch["weight"].astype(np.float64)

    def loss(params: Any) -> Any:
        scores = model.with_params(params).scores(batch["input_ids"], batch["attention_mask"])
        return (weight * (scores - batch["target"]) ** 2).sum() * 0.5 / weight.sum()

    state, metrics = Squares().update(create_state(model, optax.sgd(0.1)), batch, splits)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, model.params, jax.jit(jax.grad(loss))(model.params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, expected)
    scores = np.asarray(model.scores(batch["input_ids"], batch["attention_mask"]), np.float64)
    value = (weight * (scores - batch["target"]) ** 2).sum() * 0.5 / weight.sum()
    assert float(metrics["loss"]) == pytest.approx(value, rel=1e-5)
    assert float(metrics["score"]) == pytest.approx(scores.mean(), rel=1e-4)
    assert set(metrics) == {"loss", "score", "grad_norm"}
    before = create_state(model, optax.sgd(0.1))
    evaluated = Squares().evaluate(before, batch)
    assert set(evaluated) == {"loss", "score"}
    assert float(evaluated["loss"]) == pytest.approx(value, rel=1e-5)
    assert int(before.step) == 0


def test_declared_arrays_alone_with_their_dtypes(tiny: ModuleType) -> None:
    state = create_state(tiny.make_model("score", scale=4.0), optax.sgd(0.1))
    traced.clear()
    Squares(power=1.5).evaluate(state, make_batch(weight=None))
    assert {name: str(x.dtype) for name, x in traced[0].items()} == {
        "input_ids": "int32",
        "attention_mask": "int32",
        "target": "float32",
    }


def test_equal_objectives_share_a_program(tiny: ModuleType) -> None:
    state = create_state(tiny.make_model("score", scale=4.0), optax.sgd(0.1))
    traced.clear()
    for power in (2.25, 2.25, 2.75):
        Squares(power).evaluate(state, make_batch())
    assert len(traced) == 2
