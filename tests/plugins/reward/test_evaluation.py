"""Evaluation over held-out pairs: each once, whatever the batches, the rows and the mesh; what the artifact keeps."""

import jax
import numpy as np
import pytest
from rlhf_reward import RewardConfig, pairwise_loss
from rlhf_reward.metrics import measures

from rlhf_core import artifacts, data, hookimpl
from rlhf_core.mesh import make_mesh

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


@pytest.fixture
def train(tiny, model, tmp_path):
    """(directory, changes and inputs) → what was logged, and the artifact's contract."""

    def train(at, mesh=None, changes=None, **inputs):
        logged = {}

        class Keep:
            @hookimpl
            def rlhf_step_end(self, metrics):
                logged.update(metrics)

        config = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 2, "loss": "hinge"}
        inputs = {"model": model, "train_dataset": tiny.pairs(9), **inputs}
        config = RewardConfig(**config | (changes or {}))
        made = tiny.run("reward", config, tmp_path / at, listeners=[Keep()], mesh=mesh, **inputs)
        return logged, artifacts.open_artifact(made.path).metadata["contract"]

    return train


def own_lengths(pair):
    """Tokens of both replies after what they share, at least one each."""
    shortest = min(len(pair.chosen), len(pair.rejected))
    shared = 0
    while shared < shortest - 1 and pair.chosen[shared] == pair.rejected[shared]:
        shared += 1
    return [len(pair.chosen) - shared, len(pair.rejected) - shared]


def expected(pairs, scores, subsets, count):
    chosen, rejected = scores[:count].T
    margins = np.array([pair.margin for pair in pairs.pairs[:count]])
    loss, metrics = pairwise_loss(chosen, rejected, margins, center_rewards_coefficient=0.1)
    lengths = np.array([own_lengths(pair) for pair in pairs.pairs[:count]])
    over_all = measures(chosen, rejected, lengths, subsets[:count])
    return {"loss": float(loss), **{k: float(v) for k, v in metrics.items()}, **over_all}


@pytest.mark.parametrize(
    ("mesh", "batch", "limit"),
    [
        pytest.param({"data": 1}, 1, None, marks=pytest.mark.long),
        pytest.param({"data": 1}, 64, None, marks=pytest.mark.long),
        ({"data": 2, "fsdp": 2}, 5, 2),
    ],
    ids=str,
)
def test_every_pair_counts_once(train, rows, pairs, scores, mesh, batch, limit):
    devices = make_mesh(**mesh, devices=jax.devices()[: np.prod(list(mesh.values()))])
    changes = {"do_train": False, "max_training_steps": None, "loss": "bradley_terry"}
    changes |= {"eval_batch_size": batch, "max_evaluation_steps": limit}
    _, contract = train("run", devices, changes, train_dataset=None, eval_dataset=rows)
    found, count = contract["evaluation"], PAIRS if limit is None else 10
    assert np.std(scores) > 0.05
    subsets = [("1", "chat", None)[i % 3] for i in range(PAIRS)]
    assert found == pytest.approx(expected(pairs, scores, subsets, count), abs=2e-5)
    assert found["ties"] == 0
    assert {name for name in found if "/" in name} >= {"accuracy/1", "accuracy/chat"}


def test_subsets_are_those_of_the_rows_that_were_kept(train):
    """Of two sources of the same name; the empty reply is dropped, and its subset with it."""
    rows = [
        {"prompt": "a", "chosen": chosen, "rejected": " b", "subset": subset}
        for chosen, subset in ((" c d", "x"), ("", "dropped"), (" c", 2), (" d", ""))
    ]
    _, contract = train("run", changes={"max_training_steps": 1}, eval_dataset=[rows, rows])
    named = {name for name in contract["evaluation"] if name.startswith("accuracy/")}
    assert named == {"accuracy/x", "accuracy/2"}


def test_the_artifact_keeps_the_last_evaluation_and_the_scores_statistics(train, rows):
    """Also where there is nothing to evaluate on; what is no number is left out."""
    logged, contract = train("with", eval_dataset=rows)
    kept = contract["evaluation"]
    assert kept == {k.removeprefix("eval_"): v for k, v in logged.items() if k.startswith("eval_")}
    assert {"loss", "accuracy", "auc", "chosen/std", "accuracy/chat"} <= set(kept)
    assert contract["mean"] == pytest.approx(kept["mean_reward"], rel=1e-5)
    _, without = train("without")
    assert without["evaluation"] is None
    assert without["std"] > 0
    alike = [{"prompt": "a", "chosen": " b", "rejected": " c"}]
    logged, contract = train("alike", eval_dataset=alike)
    assert np.isnan(logged["eval_length_correlation"])
    assert "length_correlation" not in contract["evaluation"]
