"""The reward trainer from Python: datasets, spellings, the result; and its config."""

import jax
import numpy as np
import pytest
from rlhf_reward import RewardConfig, RewardTrainer

from rlhf_core import artifacts, load_model
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.scoring import Scorer

BASE = {"learning_rate": 1e-2, "total_batch_size": 4, "max_training_steps": 4, "log_steps": 2}


@pytest.fixture(scope="module")
def language_model(tiny, tmp_path_factory):
    """A Hugging Face directory without a reward head."""
    path = tmp_path_factory.mktemp("lm")
    tiny.make_model("lm", scale=4.0).save(path)
    return path


def test_from_a_directory_and_lists_of_rows(tiny, language_model, tmp_path, recwarn):
    config = RewardConfig(**BASE, save_directory=tmp_path, evaluation_steps=2)
    trainer = RewardTrainer(
        config,
        model=str(language_model),
        train_dataset=tiny.pairs(11),
        eval_dataset=tiny.pairs(5, seed=1),
    )
    result = trainer.train()
    assert not [each for each in recwarn if "head" in str(each.message)]  # training is what gives it one
    assert (result.artifact.name, result.artifact.kind) == ("model", "reward_model")
    assert result.artifact.path == tmp_path / "artifacts" / "model"
    assert all(np.isfinite(x) for x in result.metrics.values())
    steps = [row["step"] for row in tiny.read_rows(tmp_path / "metrics.jsonl")]
    assert steps == [2, 4]
    contract = artifacts.open_artifact(result.artifact.path).metadata["contract"]
    scores = Scorer.load(result.artifact.path).score_rows(as_records(tiny.pairs(5, seed=1)))
    both = np.concatenate([scores["chosen_score"], scores["rejected_score"]])
    assert (contract["mean"], contract["std"]) == pytest.approx((both.mean(), both.std()), rel=1e-4, abs=1e-6)
    assert contract["max_length"] == 1024
    accuracy = (scores["chosen_score"] > scores["rejected_score"]).mean()
    assert result.metrics["eval_accuracy"] == pytest.approx(accuracy)
    evaluation = {k.removeprefix("eval_"): v for k, v in result.metrics.items() if k.startswith("eval_")}
    assert contract["evaluation"] == evaluation
    assert trainer.evaluate() == {f"eval_{name}": value for name, value in evaluation.items()}
    trainer.save_model(tmp_path / "copy")
    assert artifacts.open_artifact(tmp_path / "copy").metadata["contract"] == contract
    with pytest.raises(InputError, match="copy exists and is not an empty directory"):
        trainer.save_model(tmp_path / "copy")


@pytest.mark.parametrize(
    ("given", "loaded", "found"),
    [
        ({"fsdp": 4}, None, {"data": 2, "fsdp": 4}),
        ({"data": 1, "sp": 2, "fsdp": -1}, None, {"data": 1, "fsdp": 4, "context": 2}),
        (None, {"fsdp": 4}, {"data": 2, "fsdp": 4}),
        ({"fsdp": 4, "data": 2}, {"fsdp": 4}, {"data": 2, "fsdp": 4}),
        (None, {"data": 2}, {"data": 8}),
        (None, None, {"data": 8}),
    ],
    ids=str,
)
def test_the_mesh_is_as_given_or_as_the_model_was_loaded(
    tiny, language_model, tmp_path, given, loaded, found
):
    meshes = []

    class Watch:
        def rlhf_stage_start(self, stage):
            meshes.append({axis: size for axis, size in stage.mesh.shape.items() if size > 1})

    model = str(language_model)
    if loaded is not None:
        sizes = {"data": -1, **loaded}
        devices = jax.devices()[: 2 if loaded == {"data": 2} else 8]
        model = load_model(language_model, head="score", mesh=make_mesh(**sizes, devices=devices))
    config = RewardConfig(**BASE, save_directory=tmp_path)
    RewardTrainer(config, model=model, train_dataset=tiny.pairs(11), mesh=given, callbacks=[Watch()]).train()
    assert meshes == [{axis: size for axis, size in found.items() if size > 1}]


def as_records(rows):
    from rlhf_core import data

    return data.load(rows)


def test_other_spellings_and_objects(tiny, tmp_path):
    model = tiny.make_model("score", scale=4.0)
    before = tiny.leaves(model.params)
    trainer = RewardTrainer(
        arguments=RewardConfig(**BASE, save_directory=tmp_path),
        model=model,
        train_dataset=tiny.pairs(8),
        processing_class=tiny.make_tokenizer(),
    )
    result = trainer.train()
    with pytest.raises(InputError, match=r"RewardTrainer\.evaluate: .* give the trainer an eval_dataset"):
        trainer.evaluate()
    after = tiny.leaves(load_model(result.artifact.path, "score").params)
    assert not np.array_equal(after["score.kernel"], before["score.kernel"])
    for name, leaf in tiny.leaves(model.params).items():  # the caller's model is whole
        np.testing.assert_array_equal(leaf, before[name])
    again = RewardTrainer(args=RewardConfig(**BASE), model=model, train_dataset=tiny.pairs(8)).train()
    for name, leaf in tiny.leaves(load_model(again.artifact.path, "score").params).items():
        np.testing.assert_array_equal(leaf, after[name])  # the same seed, data and mesh
    assert again.artifact.path != result.artifact.path


def test_the_loss_and_centring_of_a_config():
    assert RewardConfig(loss_type="hinge").loss == RewardConfig(loss="hinge").loss
    assert RewardConfig().center_rewards_coefficient == 0.1
    assert RewardConfig(center_rewards_coefficient=None).center_rewards_coefficient is None
