"""A sequence's score is its own: whatever is beside it in a batch, on either side of it, or in its row."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rlhf_reward.model_reward import ModelReward

from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.objective import sequence_scores
from rlhf_core.packing import Layout, pack, tree
from rlhf_core.scoring import Scorer, ScoringContract

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


@pytest.mark.parametrize("side", [pytest.param("left", marks=pytest.mark.long), "right"])
@pytest.mark.parametrize("width", [24, pytest.param(40, marks=pytest.mark.long)])
def test_padding_on_either_side_and_any_neighbours(model, sequences, alone, side, width):
    ids, mask = np.full((8, width), 17, np.int32), np.zeros((8, width), np.int32)
    for row, tokens in zip(ids, sequences, strict=True):
        row[slice(len(tokens)) if side == "right" else slice(width - len(tokens), None)] = tokens
    for row, tokens in zip(mask, sequences, strict=True):
        row[slice(len(tokens)) if side == "right" else slice(width - len(tokens), None)] = 1
    assert_same(model.scores(ids, mask), alone)
    order = np.random.default_rng(1).permutation(8)
    assert_same(np.asarray(model.scores(ids[order], mask[order]))[np.argsort(order)], alone)
    assert_same(model.scores(ids[3:5], mask[3:5]), alone[3:5])


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


def test_the_scorer_and_the_reward_function_read_the_same(tiny, model, tmp_path):
    tokenizer = tiny.make_tokenizer()
    prompts = ["a b c", "a b c", "d e f g h", "d e f g h"]
    completions = [" x", " y z a b", " q", ""]
    whole = [[*tokenizer(p + c)["input_ids"], END] for p, c in zip(prompts, completions, strict=True)]
    expected = [float(model.scores([ids], [[1] * len(ids)])[0]) for ids in whole]
    assert_same(
        Scorer(model, ScoringContract.of(tokenizer, max_length=None)).score_completions(prompts, completions),
        expected,
    )
    model.save(tmp_path)
    reward = ModelReward(str(tmp_path))
    with pytest.raises(RuntimeError, match="setup"):
        reward(prompts, completions)

    class Stage:
        devices, registry = staticmethod(tiny.one_device), None

    reward.setup(Stage())
    assert_same(reward(prompts, completions, number=[1, 2, 3, 4]), expected)
    assert_same(reward(prompts[::-1], completions[::-1]), expected[::-1])
    chat = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    with pytest.raises(InputError, match=rf"^reward model {tmp_path}: the tokenizer has no chat template"):
        reward([chat[0]], [chat[1]])


def test_a_resumed_run_scores_in_the_same_shapes(tiny, model, tmp_path):
    """Others would change the last bits, and with them everything that follows."""
    model.save(tmp_path)
    few, many = ["a b c"], ["d e f g h i j k l m"] * 40
    meshes = [tiny.one_device(), tiny.one_device(), make_mesh(devices=jax.devices()[:4])]
    first, again, elsewhere = (ModelReward(str(tmp_path)) for _ in meshes)
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
