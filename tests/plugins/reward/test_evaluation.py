"""Evaluation of pairs: metrics against a count of everything, each pair once in a run, and what the artifact keeps."""

import math

import jax
import numpy as np
import pytest
from rlhf_reward import RewardConfig, pairwise_loss
from rlhf_reward.metrics import accuracies, auc, calibration_error, measures, rank_correlation, ranks

from rlhf_core import artifacts, data
from rlhf_core.mesh import make_mesh
from tests.shared.short_runs import Watch


def draw_pairs(seed, size, *, coarse):
    """Scores with many ties where `coarse`, lengths with many ties always."""
    draw = np.random.default_rng(seed)
    scores = draw.normal(size=(2, size)) * 2 + [[0.7], [0.0]]
    if coarse:
        scores = np.round(scores * 2) / 2
    return *scores.astype(np.float32), draw.integers(1, 6, (size, 2))


CASES = pytest.mark.parametrize(
    ("seed", "size", "coarse"), [(0, 60, False), (1, 60, True), (2, 3, True), (3, 1, False)]
)


@CASES
def test_auc_counts_every_chosen_against_every_rejected(seed, size, coarse):
    chosen, rejected, _ = draw_pairs(seed, size, coarse=coarse)
    wins = [(c > r) + 0.5 * (c == r) for c in chosen.tolist() for r in rejected.tolist()]
    assert auc(chosen, rejected) == pytest.approx(sum(wins) / size**2, abs=1e-12)


def sigmoid(d):
    return 1 / (1 + math.exp(-d))


def both_orders(difference):
    """Every pair twice, as (predicted probability, label), in twenty bins over [0, 1]."""
    said = [(sigmoid(s * d), s == 1) for d in difference.tolist() for s in (1, -1)]
    bins = [[(p, label) for p, label in said if min(int(p * 20), 19) == b] for b in range(20)]
    each = [abs(np.mean([q for _, q in b]) - np.mean([p for p, _ in b])) * len(b) for b in bins if b]
    return sum(each) / len(said)


@CASES
def test_calibration_is_that_of_pairs_in_both_orders(seed, size, coarse):
    chosen, rejected, _ = draw_pairs(seed, size, coarse=coarse)
    difference = chosen.astype(np.float64) - rejected
    assert calibration_error(difference) == pytest.approx(both_orders(difference), abs=1e-12)


@pytest.mark.parametrize(("seed", "coarse"), [(0, False), (1, True)])
def test_ranks_and_their_correlation(seed, coarse):
    x, y, _ = draw_pairs(seed, 40, coarse=coarse)
    expected = [1 + sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]
    np.testing.assert_array_equal(ranks(x), expected)
    assert rank_correlation(x, y) == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1], abs=1e-12)
    assert rank_correlation(x, np.exp(3 * x)) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)
    assert math.isnan(rank_correlation(x, np.ones(40)))


@CASES
def test_all_metrics_together(seed, size, coarse):
    chosen, rejected, lengths = draw_pairs(seed, size, coarse=coarse)
    subsets = [("maths", "chat", None)[i % 3] for i in range(size)]
    found = measures(chosen, rejected, lengths, subsets)
    expected = {}
    for side, x in (("chosen", chosen), ("rejected", rejected)):
        x = x.astype(np.float64)
        deviation = math.sqrt(((x - x.mean()) ** 2).sum() / (size - 1)) if size > 1 else 0.0
        values = {"mean": sum(x) / size, "std": deviation, "min": min(x), "max": max(x)}
        expected |= {f"{side}/{name}": value for name, value in values.items()}
    expected["auc"] = auc(chosen, rejected)
    expected["calibration_error"] = calibration_error(chosen.astype(np.float64) - rejected)
    every = [(s, n) for i in range(size) for s, n in zip((chosen[i], rejected[i]), lengths[i], strict=True)]
    expected["length_correlation"] = rank_correlation(*map(np.array, zip(*every, strict=True)))
    expected["longer_wins_accuracy"] = sum(a > b for a, b in lengths) / size
    expected["longer_wins_ties"] = sum(a == b for a, b in lengths) / size
    for name in {"maths", "chat"} & set(subsets):
        own = [i for i in range(size) if subsets[i] == name]
        expected[f"accuracy/{name}"] = sum(chosen[i] > rejected[i] for i in own) / len(own)
    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)
    assert all(type(value) is float for value in found.values())
    assert not any(name.startswith("accuracy/") for name in measures(chosen, rejected, lengths))
    assert accuracies(np.array([True]), [None]) == {}


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

    each = [[score(ids) for ids in p] for p in zip(*pairs.sequences.values(), strict=True)]
    return np.array(each, np.float32)


@pytest.fixture
def train(tiny, model, tmp_path):
    """(directory, changes and inputs) → what was logged, and the artifact's contract."""

    def train(at, mesh=None, changes=None, **inputs):
        watch = Watch()
        config = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 2, "loss": "hinge"}
        inputs = {"model": model, "train_dataset": tiny.pairs(9), **inputs}
        config = RewardConfig(**config | (changes or {}))
        made = tiny.run("reward", config, tmp_path / at, listeners=[watch], mesh=mesh, **inputs)
        logged = {name: value for row in watch.rows for name, value in row.items()}
        return logged, artifacts.open_artifact(made.path).metadata["contract"]

    return train


def own_lengths(pair):
    """Tokens of both replies after what they share, at least one each."""
    chosen, rejected = pair
    shortest = min(len(chosen), len(rejected))
    shared = 0
    while shared < shortest - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return [len(chosen) - shared, len(rejected) - shared]


def expected(pairs, scores, subsets, count):
    chosen, rejected = scores[:count].T
    margins = pairs.values["margin"][:count]
    loss, metrics = pairwise_loss(chosen, rejected, margins, center_rewards_coefficient=0.1)
    lengths = np.array([own_lengths(pair) for pair in zip(*pairs.sequences.values(), strict=True)][:count])
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
