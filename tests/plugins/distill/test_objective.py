"""The loss of an update through models: the formula in float64, however its examples are laid out."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from rlhf_distill import DIVERGENCE, DistillConfig
from rlhf_distill.objective import objective

from rlhf_core import create_state, installed_registry
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.optimizers import make_optimizer
from rlhf_core.packing import Layout, Tree, pack
from rlhf_core.step import Accumulated, accumulate

CONFIG = DistillConfig(temperature=1.5)
ROWS = {"rows": (8,), "sequences": (4,), "trained": (24,)}
WIDTH = 12
"""More tokens than any sequence has, so that one program computes all."""


@pytest.fixture(scope="module")
def student(tiny: ModuleType) -> Any:
    return tiny.make_model(seed=2, scale=3.0, num_hidden_layers=1)


@pytest.fixture(scope="module")
def on_one_device(student: Any, teacher: Any, trees: list[Tree]) -> Any:
    """(loss, gradients of the student) in one micro-batch."""
    mesh = make_mesh(devices=jax.devices()[:1])
    return computed({"policy": student, "teacher": teacher}, trees, mesh, Layout((40,), **ROWS))


@pytest.fixture(scope="module")
def trees() -> list[Tree]:
    """Two texts, and prompts with two completions each; masks with holes."""
    draw = np.random.default_rng(3)

    def tokens(low: int, high: int) -> Any:
        return draw.integers(3, 48, draw.integers(low, high)).astype(np.int32)

    made = []
    for branches in (1, 1, 2, 2, 1, 2):
        written = tuple(tokens(2, 7) for _ in range(branches))
        masks = tuple((draw.random(len(x)) < 0.7).astype(np.float32) for x in written)
        for mask in masks:
            mask[0] = 1.0
        made.append(Tree(tokens(2, 6), written, masks))
    assert any((mask == 0).any() for tree in made for mask in tree.weights)
    return made


def expected(models: Any, trees: list[Tree]) -> float:
    """The mean over the tokens of the masks, float64, from the logits of whole sequences."""
    total = count = 0.0
    for tree in trees:
        for branch, mask in zip(tree.branches, tree.weights, strict=True):
            ids = np.concatenate([tree.prefix, branch])
            padded, seen = (np.pad(x, (0, WIDTH - len(ids)))[None] for x in (ids, np.ones_like(ids)))
            logits = [np.asarray(m.logits(padded, seen), np.float64)[0, : len(ids)] / 1.5 for m in models]
            s, t = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in logits)
            m = 0.25 * t + 0.75 * s
            terms = 0.25 * (t * np.log(t / m)).sum(-1) + 0.75 * (s * np.log(s / m)).sum(-1)
            total += (terms[len(tree.prefix) - 1 : -1] * mask).sum()
            count += mask.sum()
    return total / count


def computed(
    models: dict[str, Any],
    trees: list[Tree],
    mesh: Any,
    layout: Layout,
    splits: int = 1,
) -> Any:
    """(loss, gradients of the student) of one update."""
    models = {
        name: model.with_params(jax.device_put(model.params, model.definition.shardings(mesh)))
        for name, model in models.items()
    }
    models = {name: type(model)(**{**vars(model), "mesh": mesh}) for name, model in models.items()}
    tx, _ = make_optimizer(CONFIG, installed_registry(), 1)
    state = create_state(models, {"policy": tx}, frozen={"teacher": ".*"})
    divergence = installed_registry().get(DIVERGENCE, "jsd", beta=0.25)
    compute = objective({name: model.definition for name, model in models.items()}, divergence, CONFIG)
    one = jax.jit(lambda params, batch, done: accumulate(compute, params, batch, done, fixed=state.fixed))
    done: Accumulated | None = None
    size = -(-len(trees) // splits)
    for start in range(0, len(trees), size):
        for batch in pack(trees[start : start + size], layout):
            done = one(state.params, put_rows(mesh, batch), done)
    assert done is not None
    assert set(done.grads) == {"policy"}
    count = float(done.loss.count)
    return float(done.loss.total) / count, jax.tree.map(lambda g: np.asarray(g) / count, done.grads["policy"])


def test_the_loss_is_the_formula_however_an_update_is_laid_out(
    student: Any, teacher: Any, trees: list[Tree], on_one_device: Any
) -> None:
    """In one micro-batch, and on eight devices a text a micro-batch, in reverse."""
    models = {"policy": student, "teacher": teacher}
    reference = expected((student, teacher), trees)
    loss, first = on_one_device
    np.testing.assert_allclose(loss, reference, rtol=2e-5)
    loss, gradients = computed(models, trees[::-1], make_mesh(2, 2, 2), Layout((24,), **ROWS), splits=6)
    np.testing.assert_allclose(loss, reference, rtol=2e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(first), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6)


def test_gradients_are_slopes_of_the_loss(
    student: Any, teacher: Any, trees: list[Tree], on_one_device: Any
) -> None:
    """A step along the gradient changes the float64 formula by what the gradient says."""
    _, gradients = on_one_device
    slope = sum(float((g.astype(np.float64) ** 2).sum()) for g in jax.tree.leaves(gradients))
    step = 1e-2 / slope**0.5
    ends = []
    for sign in (1, -1):
        params = jax.tree.map(lambda p, g, sign=sign: p + sign * step * g, student.params, gradients)
        ends.append(expected((student.with_params(params), teacher), trees))
    np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), slope, rtol=2e-2)
