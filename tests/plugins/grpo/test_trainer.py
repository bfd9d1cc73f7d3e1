"""GRPO end to end on a tiny policy: the Python door, what is logged and kept, and runs that must not move."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from rlhf_grpo import GRPOConfig, GRPOTrainer

from rlhf_core import SAMPLER, Rollouts, hookimpl, load_model
from rlhf_core.errors import RunError
from tests.shared.short_runs import Watch, early

BASE = {
    "learning_rate": 0.05,
    "weight_decay": 0.0,
    "total_batch_size": 8,
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 6,
    "temperature": 0.7,
    "top_p": 0.9,
    "beta": 0.1,
    "max_training_steps": 4,
    "log_steps": 1,
}
"""Most runs have these, and so the same programs."""


def trained(tiny, model, directory, rewards=(early,), rows=None, **changes):
    watch = Watch()
    artifact = tiny.run(
        "grpo",
        GRPOConfig(**{**BASE, **changes}),
        directory,
        listeners=[watch],
        model=model,
        rewards=list(rewards),
        train_dataset=tiny.prompts(6) if rows is None else rows,
    )
    after = load_model(artifact.path, mesh=tiny.one_device())
    return SimpleNamespace(rows=watch.rows, params=tiny.leaves(after.params), directory=directory)


@pytest.fixture
def train(tiny, model, tmp_path):
    return partial(trained, tiny, model, tmp_path / "run")


@pytest.fixture(scope="module")
def one_rollout(tiny, model, tmp_path_factory):
    """Four updates over one rollout."""
    return trained(tiny, model, tmp_path_factory.mktemp("rollout"), num_iterations=4)


def moved(tiny, model, run):
    before = tiny.leaves(model.params)
    return {name for name, leaf in run.params.items() if not np.array_equal(leaf, before[name])}


def test_the_python_door(tiny, model, tmp_path):
    class Vowels:
        def __call__(self, completions, number):
            assert all(isinstance(n, int) for n in number)
            return [float(sum(c in "aeiou" for c in text)) for text in completions]

    async def patient(completion_ids):
        return [-len(ids) / 6 for ids in completion_ids]

    config = GRPOConfig(**{**BASE, "max_training_steps": 2}, save_directory=tmp_path / "out")
    trainer = GRPOTrainer(
        args=config,
        model=model,
        rewards=[early, Vowels(), patient, "length"],
        train_dataset=tiny.prompts(6),
        processing_class=tiny.make_tokenizer(),
    )
    result = trainer.train()
    assert result.artifact.kind == "language_model"
    assert result.artifacts["model"].path == result.artifact.path
    labels = {name.split("/")[1] for name in result.metrics if name.startswith("rewards/")}
    assert labels == {"early", "Vowels", "patient", "length"}
    assert all(np.isfinite(x) for x in result.metrics.values())
    assert (tmp_path / "out" / "samples" / "update-000000.jsonl").is_file()
    # The caller's model is whole and unchanged, the artifact is another.
    trained = load_model(result.artifact.path)
    assert trained.logits([[3, 4]], [[1, 1]]).shape == (1, 2, 48)
    assert not np.array_equal(model.logits([[3, 4]], [[1, 1]]), trained.logits([[3, 4]], [[1, 1]]))


SERVER = {"calls": 0, "down": True}


def judge(completions):
    SERVER["calls"] += 1
    if SERVER["down"] and SERVER["calls"] > 3:
        raise ConnectionError("no route")
    return early(completions)


def test_a_reward_that_fails_late_costs_none_of_the_updates_before_it(train, tmp_path):
    """The judge is down at the fourth rollout; the same command then goes on, to the same bits."""
    rest = {"num_preview_samples": 0, "save_interval_minutes": 1e6, "max_training_steps": 8}
    with pytest.raises(RunError, match="reward 'judge' raised ConnectionError: no route"):
        train(rewards=[judge], **rest)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["6"]
    calls, SERVER["down"] = SERVER["calls"], False
    continued = train(rewards=[judge], **rest)
    assert SERVER["calls"] == calls + 1
    shutil.rmtree(tmp_path / "run")
    whole = train(rewards=[judge], **rest)
    for name, leaf in whole.params.items():
        np.testing.assert_array_equal(leaf, continued.params[name])


def test_the_first_update_is_on_policy(tiny, one_rollout):
    """The reference and the old log-probabilities are the policy's own: the loss is minus the mean advantage."""
    first = one_rollout.rows[0]
    assert first["kl"] == 0
    assert one_rollout.rows[1]["kl"] > 1e-7
    # Decoding with a cache, one token at a time, against one packed pass over whole groups.
    assert 0 <= first["sampling/logp_difference_max"] < 1e-4
    assert first["entropy"] > 0.1
    rows = tiny.read_rows(one_rollout.directory / "samples" / "update-000000.jsonl")
    total = sum(row["advantage"] * row["length"] for row in rows)
    assert first["loss"] == pytest.approx(-total / sum(row["length"] for row in rows), abs=1e-5)


def test_likely_ids_that_no_token_has_are_never_sampled_and_everyone_agrees_about_it(tiny, tmp_path):
    """Rows with which a vocabulary is padded, here most of the probability."""
    made, size = tiny.make_model("lm", scale=4.0, vocab_size=64), len(tiny.WORDS)
    head = made.params["lm_head"]["kernel"]
    policy = made.with_params({**made.params, "lm_head": {"kernel": head.at[:, size:].multiply(30.0)}})
    read = []

    def none(completion_ids, **_):
        read.extend(int(i) for ids in completion_ids for i in ids)
        return [float(len(ids) % 3) for ids in completion_ids]

    run = trained(tiny, policy, tmp_path, [none], num_iterations=1, max_training_steps=1)
    assert 0 < max(read) < size
    first = run.rows[0]
    assert first["sampling/logp_difference_max"] < 1e-4
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert first["entropy"] > 0.1
    np.testing.assert_array_equal(
        run.params["lm_head.kernel"][:, size:], policy.params["lm_head"]["kernel"][:, size:]
    )


def test_a_sampler_that_chooses_ids_without_a_token_is_named(tiny, tmp_path):
    class Plugin:
        @hookimpl
        def rlhf_register(self, registry):
            registry.add(SAMPLER, "odd", lambda inputs: sample)

    def sample(params, prompts, key, ids=None):
        shape = (4 * len(prompts), 6)
        return Rollouts(
            np.full(shape, 50), np.full(shape[0], 6), np.zeros(shape, np.float32), np.zeros(shape[0], bool)
        )

    config = GRPOConfig(**BASE, sampler="odd")
    inputs = {"model": tiny.make_model(vocab_size=64), "rewards": [early], "train_dataset": tiny.prompts(6)}
    with pytest.raises(RunError, match=r"sampler: 48 of 48 sampled ids are not tokens.*the first is 50"):
        tiny.run("grpo", config, tmp_path, listeners=[Plugin()], **inputs)


def test_many_iterations_over_one_rollout_reach_the_clip(one_rollout):
    regions = [row["clip_ratio/region_mean"] for row in one_rollout.rows]
    assert regions[0] == 0
    assert max(regions) > 0.05
    assert len({row["reward"] for row in one_rollout.rows}) == 1


def test_where_all_completions_are_truncated_and_masked_nothing_moves(tiny, model, train):
    """With every term of the loss."""

    def first_token(completion_ids):
        return [float(ids[0]) for ids in completion_ids]

    run = train(
        [first_token],
        max_completion_length=1,
        mask_truncated_completions=True,
        seed=2,
        max_training_steps=1,
        top_entropy_quantile=0.5,
        entropy_coef=0.1,
    )
    assert len(run.rows) == 1
    assert {row["completions/clipped_ratio"] for row in run.rows} == {1.0}
    assert all(row["reward_std"] > 0 for row in run.rows)
    assert {row["loss"] for row in run.rows} == {0.0}
    assert {row["grad_norm"] for row in run.rows} == {0.0}
    assert moved(tiny, model, run) == set()


def test_rewards_that_are_all_equal_move_nothing(tiny, model, train):
    """Neither with the first update of a rollout nor the second: policy and reference are one model."""
    run = train([lambda completions: [0.7] * len(completions)], max_training_steps=2)
    assert [row["frac_reward_zero_std"] for row in run.rows] == [1.0, 1.0]
    assert [row["kl"] for row in run.rows] == [0.0, 0.0]
    assert [row["grad_norm"] for row in run.rows] == [0.0, 0.0]
    assert moved(tiny, model, run) == set()


def test_evaluation(tiny, model, tmp_path):
    config = GRPOConfig(
        **{**BASE, "max_training_steps": 2},
        save_directory=str(tmp_path),
        evaluation_steps=1,
        eval_on_start=True,
        evaluation={"num_generations": 2, "pass_threshold": 0.5, "sampling": {"temperature": 0.7}},
    )
    result = GRPOTrainer(
        config,
        model=model,
        rewards=[early],
        train_dataset=tiny.prompts(6),
        eval_dataset=tiny.prompts(5, seed=4),
    ).train()
    assert result.metrics["eval_frac_reward_zero_std"] < 1
    rows = [row for row in tiny.read_rows(tmp_path / "metrics.jsonl") if "eval_reward" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["eval_pass@1"] <= row["eval_pass@2"] <= 1 for row in rows)
    assert all(row["eval_reward"] == row["eval_rewards/early/mean"] for row in rows)
    written = tiny.read_rows(tmp_path / "samples" / "evaluation-000002.jsonl")
    rewards = np.array([line["reward"] for line in written]).reshape(-1, 2)
    assert len(rewards) == 5  # all of eval_data: what is named alike in training is the same quantity here
    evaluation = json.loads((tmp_path / "evaluations" / "000002.json").read_text())
    assert [row["row"] for row in evaluation["rows"]] == [1, 2, 3, 4, 5]
    assert [row["reward"] for row in evaluation["rows"]] == pytest.approx(rewards.mean(1).tolist())
    assert evaluation["step"] == 2
    assert evaluation["metrics"]["eval_reward"] == rows[-1]["eval_reward"]
    assert rows[-1]["eval_reward_std"] == pytest.approx(rewards.std(1, ddof=1).mean())
    assert rows[-1]["eval_reward_std_all"] == pytest.approx(rewards.std(ddof=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"limits": {"entropy": 100.0}},
            r"stopped after update 2 of 4: the policy has collapsed: entropy .* below limits",
        ),
        (
            {"beta": 0.0, "limits": {"kl": 1e-9}},
            r"stopped after update 2 of 4: the policy has drifted too far from its reference: kl .* above limits",
        ),
    ],
    ids=["entropy", "kl"],
)
def test_a_collapsing_run_stops_with_its_state(train, tmp_path, changes, message):
    with pytest.raises(RunError, match=message):
        train(log_steps=2, **changes)
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    assert not (tmp_path / "run" / "artifacts").exists()


def test_a_sampler_that_is_not_the_policy_is_corrected_for(tiny, model, tmp_path):
    """A stranger's sampler, by name: it draws from the policy and reports other log-probabilities."""

    def off_by_a_bit(inputs):
        from rlhf_core.sampling import make_sampler

        own = make_sampler(inputs)

        def sample(params, prompts, key, ids=None):
            drawn = own(params, prompts, key, ids)
            return drawn._replace(logps=drawn.logps - 0.1 * (drawn.logps < 0))

        return sample

    class Plugin:
        @hookimpl
        def rlhf_register(self, registry):
            registry.add(SAMPLER, "off", off_by_a_bit)

    watch = Watch()
    for correction in (None, {"level": "token", "mode": "truncate", "max": 1.05}):
        config = GRPOConfig(**{**BASE, "max_training_steps": 1}, sampler="off", sampler_correction=correction)
        tiny.run(
            "grpo",
            config,
            tmp_path / str(correction),
            listeners=[Plugin(), watch],
            model=model,
            rewards=[early],
            train_dataset=tiny.prompts(6),
        )
    plain, corrected = watch.rows
    assert plain["sampling/logp_difference_mean"] == pytest.approx(0.1, abs=1e-4)
    # Every ratio is exp(0.1), cut at 1.05: the whole policy gradient is 1.05 times as large. The KL has none yet.
    assert corrected["sampling/importance_ratio_min"] == pytest.approx(1.05)
    assert corrected["grad_norm"] == pytest.approx(1.05 * plain["grad_norm"], rel=1e-4)
