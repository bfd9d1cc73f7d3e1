"""A sequence's score is its own: whatever is beside it in a batch, on either side of it, or in its row."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rlhf_core import REWARD, installed_registry
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.objective import sequence_scores
from rlhf_core.packing import Layout, pack, tree

END = 1
compute = jax.jit(sequence_scores, static_argnums=0)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("score", scale=6.0)


@pytest.fixture(scope="module")
def sequences():
    draw = np.random.default_rng(0)
    starts = [draw.integers(3, 48, n) for n in (1, 4, 9, 15)]
    return [np.r_[s, draw.integers(3, 48, n), END].astype(np.int32) for s in starts for n in (1, 6)]


@pytest.fixture(scope="module")
def alone(model, sequences):
    """Each sequence in a batch of its own, without padding."""
    return np.array([float(model.scores(ids[None], np.ones_like(ids[None]))[0]) for ids in sequences])


def assert_same(found, alone):
    found = np.asarray(found, np.float64)
    assert np.std(alone) > 0.05
    assert (np.abs(found - alone) <= 1e-5 * (1 + np.abs(alone))).all(), np.abs(found - alone).max()


@pytest.mark.parametrize("shared", [False, True], ids=["one by one", "prompts shared"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout((64,), (6,), (8,), (64,)), marks=pytest.mark.long),
        pytest.param(Layout((128,), (2,), (16,), (128,)), marks=pytest.mark.long),
        Layout((32, 64), (4, 2), (4, 8), (32, 64)),
    ],
    ids=["64", "128", "32 and 64"],
)
def test_packing(model, sequences, alone, layout, shared):
    size = 2 if shared else 1
    trees = [tree(sequences[i : i + size]) for i in range(0, 8, size)]
    assert any(len(t.prefix) for t in trees) == shared
    for order in (range(len(trees)), range(len(trees) - 1, -1, -1)):
        found = np.full(8, np.nan)
        for batch in pack([trees[i] for i in order], layout):
            scores = np.asarray(compute(model.definition, model.params, put_rows(model.mesh, batch)))
            seen = {}
            for row, place in zip(*np.nonzero(batch.last >= 0), strict=True):
                which = list(order)[batch.example[row, place]]
                found[which * size + seen.setdefault((row, which), 0)] = scores[row, place]
                seen[row, which] += 1
        assert_same(found, alone)


def reward_of(directory):
    return installed_registry().get(REWARD, "model", model=str(directory))


def test_a_reward_is_set_up_before_it_is_called(model, tmp_path):
    model.save(tmp_path)
    with pytest.raises(RuntimeError, match="setup"):
        reward_of(tmp_path)(["a"], [" b"])


def test_a_resumed_run_scores_in_the_same_shapes(tiny, model, tmp_path):
    """Others would change the last bits, and with them everything that follows."""
    model.save(tmp_path)
    few, many = ["a b c"], ["d e f g h i j k l m"] * 40
    meshes = [tiny.one_device(), tiny.one_device(), make_mesh(devices=jax.devices()[:4])]
    first, again, elsewhere = (reward_of(tmp_path) for _ in meshes)
    for reward, mesh in zip((first, again, elsewhere), meshes, strict=True):
        reward.setup(SimpleNamespace(devices=lambda mesh=mesh: mesh, registry=None))
    assert first.snapshot() == {}
    again.restore({})
    first(few, [" x"])
    kept = json.loads(json.dumps(first.snapshot()))
    for reward in (again, elsewhere):
        reward.restore(kept)
    assert again.snapshot() == first.snapshot()
    assert again(many, [" x y"] * 40) == first(many, [" x y"] * 40)
    assert len(elsewhere(few, [" x"])) == 1  # its mesh takes rows by four: shapes of its own
    assert elsewhere.snapshot() != first.snapshot()
