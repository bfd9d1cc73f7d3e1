"""Values per sequence and per trained token, for every branch in order, however trees are packed, split or sharded.

Two batches at most are dispatched and not read.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import reading
from rlhf_core.fit import TreeReader, evaluator
from rlhf_core.mesh import make_mesh, replicated_sharding
from rlhf_core.metrics import Mean
from rlhf_core.objective import sequence_scores, trained_scores
from rlhf_core.packing import Layout, Tree


def trees(draw: np.random.Generator) -> list[Tree]:
    """Trees of several branches, some too large for a row, with holes in what is trained."""

    def ids(n: int) -> np.ndarray:
        return draw.integers(3, 30, n).astype(np.int32)

    made = []
    for branches, prefix in ((3, 4), (1, 0), (2, 7), (9, 3), (1, 5)):
        own = tuple(ids(n) for n in draw.integers(1, 7, branches))
        weights = tuple((draw.random(len(b)) < 0.7).astype(np.float32) for b in own)
        made.append(Tree(ids(prefix), own, weights))
    return made


LAYOUT = Layout((16, 32), (8, 8), (4, 6), (16, 32))


def trained(tree: Tree, branch: int) -> np.ndarray:
    assert tree.weights is not None
    weight = tree.weights[branch].copy()
    if not len(tree.prefix):
        weight[0] = 0  # nothing predicts a first token
    return np.flatnonzero(weight)


def test_scores_of_every_branch_as_computed_one_by_one(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its last token, and at the parent of each trained one, on eight devices: every run reads on one."""
    monkeypatch.setattr(reading, "CHUNK", 2)
    model = tiny.make_model("score", scale=4.0)
    mesh = make_mesh(8)
    definition = model.definition
    params = jax.device_put(model.params, definition.shardings(mesh))
    given = trees(np.random.default_rng(0))
    values = TreeReader(partial(trained_scores, definition), LAYOUT, mesh, per="token")(params, given)
    last = TreeReader(partial(sequence_scores, definition), LAYOUT, mesh, per="sequence")(params, given)
    branches = [(tree, i) for tree in given for i in range(len(tree.branches))]
    assert len(values) == len(last) == len(branches)
    positions = np.arange(16, dtype=np.int32)[None]  # one program for texts of every length

    @jax.jit
    def score(tokens: Any) -> Any:
        hidden = definition.hidden(model.params, tokens, positions, np.full_like(positions, 16))
        return definition.score(model.params, hidden)[0]

    for (tree, i), found, at_end in zip(branches, values, last, strict=True):
        tokens = np.concatenate([tree.prefix, tree.branches[i]])
        scores = np.asarray(score(np.pad(tokens, (0, 16 - len(tokens)))[None]))
        expected = scores[len(tree.prefix) + trained(tree, i) - 1]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(at_end, scores[len(tokens) - 1], rtol=0, atol=1e-5)
    assert np.std(last) > 1e-3


def test_several_values_of_one_pass() -> None:
    """Each by its name; compiled before, so that reading traces nothing; no tree has the names all the same."""
    mesh, traced = make_mesh(), []

    def read(params: Any, batch: Any) -> Any:
        traced.append(batch.trained.shape)
        token = jnp.take_along_axis(batch.rows.tokens, jnp.maximum(batch.trained, 0), axis=1)
        return {"token": token, "scaled": params["by"] * token}

    given = trees(np.random.default_rng(2))
    params = jax.device_put({"by": np.float32(3)}, replicated_sharding(mesh))
    reader = TreeReader(read, LAYOUT, mesh, per="token")
    reader.compile(params)
    count = len(traced)
    assert count == len(LAYOUT.time)
    values = reader(params, given)
    assert len(traced) == count
    branches = [(tree, i) for tree in given for i in range(len(tree.branches))]
    assert set(values) == {"token", "scaled"}
    for number, (tree, i) in enumerate(branches):
        expected = tree.branches[i][trained(tree, i)]
        np.testing.assert_array_equal(values["token"][number], expected)
        np.testing.assert_array_equal(values["scaled"][number], 3 * expected)
    assert reader(params, []) == {"token": [], "scaled": []}


def test_values_per_sequence_read_the_values_of_trees() -> None:
    given = trees(np.random.default_rng(1))
    numbers = [np.arange(len(tree.branches), dtype=np.float32) + 10 * i for i, tree in enumerate(given)]
    valued = [tree._replace(sequence_values={"value": x}) for tree, x in zip(given, numbers, strict=True)]

    def scaled(params: Any, batch: Any) -> Any:
        return params * batch.sequence_values["value"]

    reader = TreeReader(scaled, LAYOUT, make_mesh(), per="sequence", sequence_names=("value",))
    found = reader(np.float32(2), valued)
    np.testing.assert_array_equal(found, 2 * np.concatenate(numbers))
    assert found.dtype == np.float32
    assert reader(np.float32(2), []).shape == (0,)


def test_pairs_stay_together() -> None:
    """Both sequences of a pair are in one row, with `group`."""

    def neighbours(params: Any, batch: Any) -> Any:
        pair = params * batch.example[:, ::2]
        return pair.repeat(2, axis=1) - batch.example

    draw = np.random.default_rng(2)
    given = [
        Tree(np.zeros(0, np.int32), tuple(draw.integers(3, 9, n).astype(np.int32) for n in (5, 6)))
        for _ in range(20)
    ]
    found = TreeReader(neighbours, LAYOUT, make_mesh(), per="sequence")(np.int32(1), given, group=2)
    np.testing.assert_array_equal(found.reshape(-1, 2), np.zeros((20, 2)))


class Device:
    """Counts what was computed and not read yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.most = 0, 0
        monkeypatch.setattr(reading, "put_rows", lambda mesh, batch: batch)
        monkeypatch.setattr(reading, "jax", SimpleNamespace(device_get=self.read))

    def compute(self, batch: int) -> Any:
        self.there += 1
        self.most = max(self.most, self.there)
        return Mean(np.float32(batch), np.float32(1)), {"double": Mean(np.float32(2 * batch), np.float32(1))}

    def read(self, result: Any) -> Any:
        self.there -= 1
        return result


def test_the_evaluator_of_every_trainer_goes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr("rlhf_core.fit.evaluation.jax", SimpleNamespace(jit=lambda f: f))
    evaluate = evaluator(lambda params, batch: device.compute(batch), None, lambda: range(5))  # type: ignore[arg-type]
    assert evaluate(SimpleNamespace(params=None)) == {"loss": 2.0, "double": 4.0}  # type: ignore[arg-type]
    assert (device.most, device.there) == (2, 0)


def test_long_evaluations_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    device, now, said = Device(monkeypatch), [0.0], []

    def compute(batch: int) -> Any:
        now[0] += 2.0
        return device.compute(batch)

    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: now[0]))
    list(reading.compute_batches(compute, None, range(40), said.append))  # type: ignore[arg-type]
    assert said == ["evaluating 3/40", "evaluating 29/40"]
    said.clear()
    list(reading.compute_batches(compute, None, range(2), said.append))  # type: ignore[arg-type]
    assert said == []


def test_only_what_is_slow_is_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    said: list[str] = []
    with reading.say_if_slow(said.append, "quick"):
        pass
    monkeypatch.setattr(reading, "QUIET_SECONDS", 0.01)
    with reading.say_if_slow(said.append, "slow"):
        time.sleep(0.5)
    assert said == ["slow"]
