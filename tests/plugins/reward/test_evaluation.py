"""Evaluation over held-out pairs: each once, whatever the batches, the rows and the mesh; what the artifact keeps."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from rlhf_reward import RewardConfig, pairwise_loss
from rlhf_reward.evaluation import Evaluation, finite
from rlhf_reward.losses import BradleyTerry
from rlhf_reward.metrics import measures
from rlhf_reward.objective import pair_loss

from rlhf_core import artifacts, create_state, data, hookimpl
from rlhf_core.mesh import make_mesh
from rlhf_core.training import HeldOut

MEASURE = partial(pair_loss, BradleyTerry(), coefficient=0.1, name="bradley_terry")
PAIRS = 23


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("score", scale=4.0)


@pytest.fixture(scope="module")
def rows(tiny):
    """Two subsets, and rows without one."""
    rows = tiny.pairs(PAIRS, seed=2)
    return [row | {"subset": (1, "chat", None)[i % 3]} for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def pairs(tiny, rows):
    return data.encode_pairs(data.load(rows), tiny.make_tokenizer(), max_length=64)


@pytest.fixture(scope="module")
def scores(model, pairs):
    """Each sequence in a batch of its own, of one width: float32 [pairs, 2]."""

    def score(ids):
        padded, mask = (np.pad(x, (0, 20 - len(ids)))[None] for x in (ids, np.ones_like(ids)))
        return float(model.scores(padded, mask)[0])

    each = [[score(ids) for ids in p[:2]] for p in pairs.pairs]
    return np.array(each, np.float32)


def own_lengths(pair):
    """Tokens of both replies after what they share, at least one each."""
    shortest = min(len(pair.chosen), len(pair.rejected))
    shared = 0
    while shared < shortest - 1 and pair.chosen[shared] == pair.rejected[shared]:
        shared += 1
    return [len(pair.chosen) - shared, len(pair.rejected) - shared]


def expected(pairs, scores, subsets, count=PAIRS):
    chosen, rejected = scores[:count].T
    margins = np.array([pair.margin for pair in pairs.pairs[:count]])
    loss, metrics = pairwise_loss(chosen, rejected, margins, center_rewards_coefficient=0.1)
    lengths = np.array([own_lengths(pair) for pair in pairs.pairs[:count]])
    over_all = measures(chosen, rejected, lengths, subsets[:count])
    return {"loss": float(loss), **{k: float(v) for k, v in metrics.items()}, **over_all}


def make_evaluation(pairs, config, model):
    context = SimpleNamespace(config=config, mesh=model.mesh, has_devices=True, say=print)
    held_out = HeldOut(context, model, pairs, pairs.trees(), reads_tokens=False, group=2)
    return Evaluation(pairs, held_out, model, MEASURE)


@pytest.mark.parametrize(
    ("mesh", "batch", "limit"),
    [
        pytest.param({"data": 1}, 1, None, marks=pytest.mark.long),
        pytest.param({"data": 1}, 64, None, marks=pytest.mark.long),
        pytest.param({"data": 2, "fsdp": 2}, 5, None, marks=pytest.mark.long),
        ({"data": 2, "fsdp": 2}, 5, 2),
    ],
    ids=str,
)
def test_every_pair_counts_once(model, rows, pairs, scores, mesh, batch, limit):
    devices = make_mesh(**mesh, devices=jax.devices()[: np.prod(list(mesh.values()))])
    params = jax.device_put(model.params, model.definition.shardings(devices))
    spread = replace(model, params=params, mesh=devices)
    config = RewardConfig(eval_batch_size=batch, max_evaluation_steps=limit)
    subsets = [("1", "chat", None)[i % 3] for i in range(PAIRS)]
    evaluation = make_evaluation(pairs, config, spread)
    state = create_state(spread, optax.identity())
    found, count = evaluation(state), PAIRS if limit is None else 10
    assert np.std(scores) > 0.05
    np.testing.assert_allclose(evaluation.scores(state), scores[:count], atol=1e-5)
    assert found == pytest.approx(expected(pairs, scores, subsets, count), abs=2e-5)
    assert found["ties"] == 0
    assert {name for name in found if "/" in name} >= {"accuracy/1", "accuracy/chat"}


def test_what_was_found_is_kept_for_the_same_parameters(model, pairs, monkeypatch):
    evaluation = make_evaluation(pairs, RewardConfig(), model)
    calls = []
    inner = evaluation._score
    monkeypatch.setattr(evaluation, "_score", lambda params: calls.append(1) or inner(params))
    state = create_state(model, optax.identity())
    assert evaluation(state) is evaluation(state)
    assert len(calls) == 1
    moved = create_state(model.with_params(jax.tree.map(lambda x: 1.1 * x, model.params)), optax.identity())
    assert evaluation(moved)["margin"] != evaluation(state)["margin"]
    assert len(calls) == 3


def test_subsets_are_those_of_the_rows_that_were_kept(tiny, model):
    rows = [
        {"prompt": "a", "chosen": chosen, "rejected": " b", "subset": subset}
        for chosen, subset in ((" c d", "x"), ("", "dropped"), (" c", 2), (" d", ""))
    ]
    for source in ([rows, rows], rows):  # two sources of the same name
        records = data.load(source)
        kept = data.encode_pairs(records, tiny.make_tokenizer(), max_length=64)
        evaluation = make_evaluation(kept, RewardConfig(), model)
        assert evaluation.subsets == ["x", "2", None] * (len(records) // 4)
    plain = data.load([{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in rows])
    kept = data.encode_pairs(plain, tiny.make_tokenizer(), max_length=64)
    assert make_evaluation(kept, RewardConfig(), model).subsets == [None] * len(kept)


def test_the_artifact_keeps_the_last_evaluation_and_the_scores_statistics(tiny, model, rows, tmp_path):
    """Also where the loop itself had nothing left to do, and where there is nothing to evaluate on."""
    base = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 2, "loss": {"name": "hinge"}}

    def train(at, **inputs):
        logged = {}

        class Keep:
            @hookimpl
            def rlhf_step_end(self, metrics):
                logged.update(metrics)

        inputs |= {"model": model, "train_dataset": tiny.pairs(9)}
        made = tiny.run("reward", RewardConfig(**base), tmp_path / at, listeners=[Keep()], **inputs)
        return logged, artifacts.open_artifact(made.path).metadata["contract"]

    logged, contract = train("with", eval_dataset=rows)
    kept = contract["evaluation"]
    assert kept == {k.removeprefix("eval_"): v for k, v in logged.items() if k.startswith("eval_")}
    assert {"loss", "accuracy", "auc", "chosen/std", "accuracy/chat"} <= set(kept)
    assert contract["mean"] == pytest.approx(kept["mean_reward"], rel=1e-5)
    _, without = train("without")
    assert without["evaluation"] is None
    assert without["std"] > 0


def test_a_metric_that_is_not_a_number_is_left_out_of_the_artifact():
    assert finite({"a": 1.0, "b": float("nan"), "c": float("inf")}) == {"a": 1.0}
