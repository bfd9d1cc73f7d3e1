"""A loss over padded batches: declared arrays, parts of a batch, and a program per value of the objective."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rlhf_core import create_state
from rlhf_core.metrics import Mean
from rlhf_core.training import PaddedObjective

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
