"""Values per sequence: for every branch of every tree in order, however trees are packed, split or sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.fit import per_sequence, reading
from rlhf_core.mesh import make_mesh
from rlhf_core.objective import sequence_scores
from rlhf_core.packing.layout import Layout
from rlhf_core.packing.rows import Tree

LAYOUT = Layout((16, 32), (8, 8), (4, 6), (0, 0))


def trees(draw: np.random.Generator) -> list[Tree]:
    """Trees of several branches, some too large for a row."""

    def ids(n: int) -> np.ndarray:
        return draw.integers(3, 30, n).astype(np.int32)

    shapes = ((3, 4), (1, 0), (2, 7), (9, 3), (1, 5))
    return [Tree(ids(prefix), tuple(ids(n) for n in draw.integers(1, 7, count))) for count, prefix in shapes]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 8])  # every run reads on one
def test_scores_of_every_branch_as_computed_one_by_one(
    devices: int, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 2)
    model = tiny.make_model("score", scale=4.0)
    mesh = make_mesh(devices=jax.devices()[:devices])
    definition = model.definition
    params = jax.device_put(model.params, definition.shardings(mesh))
    given = trees(np.random.default_rng(0))
    found = per_sequence(partial(sequence_scores, definition), params, given, LAYOUT, mesh)
    whole = [np.concatenate([tree.prefix, branch]) for tree in given for branch in tree.branches]
    lengths = np.array([len(tokens) for tokens in whole])
    padded = np.stack([np.pad(tokens, (0, lengths.max() - len(tokens))) for tokens in whole])
    masks = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int32)
    # Row by row, but with one program for all lengths.
    expected = [
        float(model.scores(row[None], mask[None])[0]) for row, mask in zip(padded, masks, strict=True)
    ]
    assert np.std(expected) > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_program_is_compiled_once_per_shape_and_reads_the_values_of_trees() -> None:
    mesh, traced = make_mesh(), []

    def doubled(params: Any, batch: Any) -> Any:
        traced.append(batch.last.shape)
        return params * batch.sequence_values["value"]

    values = [
        np.arange(len(tree.branches), dtype=np.float32) + 10 * i
        for i, tree in enumerate(trees(np.random.default_rng(1)))
    ]
    given = [
        tree._replace(sequence_values={"value": value})
        for tree, value in zip(trees(np.random.default_rng(1)), values, strict=True)
    ]
    for _ in range(2):
        found = per_sequence(doubled, np.float32(2), given, LAYOUT, mesh, sequence_names=("value",))
    assert sorted(traced) == sorted(set(traced))
    np.testing.assert_array_equal(found, 2 * np.concatenate(values))
    assert found.dtype == np.float32
    assert per_sequence(doubled, np.float32(2), [], LAYOUT, mesh, sequence_names=("value",)).shape == (0,)


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
    found = per_sequence(neighbours, np.int32(1), given, LAYOUT, make_mesh(), group=2)
    np.testing.assert_array_equal(found.reshape(-1, 2), np.zeros((20, 2)))
