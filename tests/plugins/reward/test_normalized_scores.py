"""Normalized scores, by the stored mean and deviation: from Python, `rlhf score` and the reward `model`."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from rlhf_reward import RewardConfig

from rlhf_core import REWARD, data, plugins
from rlhf_core.errors import InputError
from rlhf_core.scoring import Scorer, ScoringContract
from tests.shared import commands


@pytest.fixture(scope="module")
def held_out(tiny):
    return tiny.pairs(7, seed=1)


@pytest.fixture(scope="module")
def artifact(tiny, held_out, tmp_path_factory):
    """A reward model whose scores are far from mean 0 and deviation 1."""
    config = RewardConfig(learning_rate=1e-2, total_batch_size=4, max_training_steps=2)
    data = {"train_dataset": tiny.pairs(8), "eval_dataset": held_out}
    model = tiny.make_model("score", scale=6.0)
    return tiny.run("reward", config, tmp_path_factory.mktemp("rm"), model=model, **data)


@pytest.fixture(scope="module")
def plain(artifact, held_out):
    """Scores in reward units, float64 [7, 2]."""
    found = Scorer.load(artifact.path).score_rows(data.load(held_out))
    return np.stack([found["chosen_score"], found["rejected_score"]], 1).astype(np.float64)


def normalized(plain, artifact):
    contract = artifact.metadata["contract"]
    assert abs(contract["mean"]) > 0.02
    assert abs(contract["std"] - 1) > 0.1
    return (plain - contract["mean"]) / contract["std"]


def test_scores_of_the_evaluation_data_have_mean_0_and_deviation_1(artifact, held_out, plain):
    scorer = Scorer.load(artifact.path, normalize=True)
    found = scorer.score_rows(data.load(held_out))
    both = np.stack([found["chosen_score"], found["rejected_score"]], 1)
    assert both.dtype == np.float32
    np.testing.assert_allclose(both, normalized(plain, artifact), atol=1e-5)
    assert both.mean() == pytest.approx(0, abs=1e-4)
    assert both.std() == pytest.approx(1, abs=1e-4)
    prompts, completions = zip(*((row["prompt"], row["chosen"]) for row in held_out), strict=True)
    np.testing.assert_allclose(scorer.score_completions(prompts, completions), both[:, 0], atol=1e-5)


def test_the_command(artifact, held_out, plain, tiny, tmp_path):
    source = tiny.write_rows(tmp_path / "pairs.jsonl", held_out)
    said = {}
    for name, flags in (("plain", []), ("normalized", ["--normalize"])):
        said[name] = commands.rlhf("score", artifact.path, source, "-o", tmp_path / name, *flags).output
    assert said["plain"] == said["normalized"]  # the accuracy is that of the same model
    for name, expected in (("plain", plain), ("normalized", normalized(plain, artifact))):
        rows = tiny.read_rows(tmp_path / name)
        found = [[row["chosen_score"], row["rejected_score"]] for row in rows]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_reward_model(tiny, artifact, held_out, plain):
    registry = plugins.load().registry
    reward = registry.get(REWARD, "model", model=str(artifact.path), normalize=True)
    reward.setup(SimpleNamespace(devices=tiny.one_device, registry=registry))
    found = reward([row["prompt"] for row in held_out], [row["rejected"] for row in held_out])
    np.testing.assert_allclose(found, normalized(plain, artifact)[:, 1], atol=1e-5)


def test_without_a_deviation_nothing_is_normalized(tiny):
    model = tiny.make_model("score", scale=6.0)
    same = ScoringContract.of(model.tokenizer, max_length=None, mean=0.5, std=0.0)
    with pytest.raises(InputError, match="deviation of its scores is 0"):
        Scorer(model, same, normalize=True)


def test_a_contract_without_the_newer_fields_is_read(tiny):
    given = ScoringContract.of(tiny.make_tokenizer(), max_length=8, mean=0.5, std=2.0)
    older = json.loads(json.dumps(given.to_dict()))
    del older["evaluation"]
    assert ScoringContract.from_dict(older, "x") == given
    for odd in ({**older, "more": 1}, {k: v for k, v in older.items() if k != "max_length"}):
        with pytest.raises(InputError, match=r"x: .* not one this version knows \((more|max_length)\)"):
            ScoringContract.from_dict(odd, "x")
