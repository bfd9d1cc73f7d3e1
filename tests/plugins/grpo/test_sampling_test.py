"""The sampling test in runs: every sampled token is read, an honest sampler passes, and a lying one ends the run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rlhf_audit import audit
from rlhf_distill import DistillConfig
from rlhf_dpo import OnlineDPOConfig
from rlhf_grpo import GRPOConfig

from rlhf_core import SAMPLER, hookimpl
from rlhf_core.errors import RunError
from rlhf_core.plugins import load_file
from rlhf_core.rollouts import Rollout
from rlhf_core.runs import open_run
from rlhf_core.sampling import make_sampler
from tests.shared import sampled_values
from tests.shared.short_runs import Watch, early

BASE = {
    "learning_rate": 0.01,
    "weight_decay": 0.0,
    "total_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 12,
    "beta": 0.0,
    "max_training_steps": 3,
    "num_preview_samples": 0,
    "log_steps": 1,
}


ppo = load_file(Path(__file__).parents[3] / "examples/plugins/rlhf-ppo/rlhf_ppo.py")
SAMPLES = {"temperature": 0.9, "max_completion_length": 12}
OTHERS = {
    "online_dpo": OnlineDPOConfig(num_generations=4, sampling=SAMPLES, total_batch_size=32),
    "distill": DistillConfig(on_policy_fraction=0.5, sampling=SAMPLES, total_batch_size=24),
    "ppo": ppo.PPOConfig(sampling=SAMPLES, total_batch_size=32),
}


class Lies:
    """Samplers that say the policy's log-probabilities, and draw otherwise."""

    @hookimpl
    def rlhf_register(self, registry):
        registry.add(SAMPLER, "greedy", lambda inputs: self.drawn(inputs, temperature=0.0))
        registry.add(SAMPLER, "unfiltered", lambda inputs: self.drawn(inputs, top_k=None, top_p=1.0))
        registry.add(SAMPLER, "two_engines", self.two_engines)

    def drawn(self, inputs, **changes):
        return make_sampler(replace(inputs, options=inputs.options.replace(**changes)))

    def two_engines(self, inputs):
        """The second of which is greedy."""
        made = self.drawn(inputs), self.drawn(inputs, temperature=0.0)

        class Sampler:
            engines = 2

            def __call__(self, params, prompts, key, ids=None):
                one, two = (each(params, prompts, key, ids) for each in made)
                second = np.arange(len(one.lengths)) % 2 == 1
                chosen = [
                    np.where(second.reshape(-1, *[1] * (a.ndim - 1)), b, a)
                    for a, b in zip(one, two, strict=True)
                ]
                return type(one)(*chosen)._replace(engine=second.astype(np.int16))

        return Sampler()


@pytest.fixture(scope="module")
def saved(tiny, model, tmp_path_factory):
    """The model in a directory, as adapters need it."""
    directory = tmp_path_factory.mktemp("model")
    model.save(directory)
    return directory


@pytest.fixture
def train(tiny, model, saved, tmp_path):
    def train(at="run", rewards=(early,), **changes):
        watch = Watch()
        tiny.run(
            "grpo",
            GRPOConfig(**{**BASE, **changes}),
            tmp_path / at,
            listeners=[Lies(), watch],
            model=saved if "lora" in changes else model,
            rewards=list(rewards),
            train_dataset=tiny.prompts(12),
        )
        return watch.rows

    return train


def values(directory):
    """The arrays of every file of values, in order."""
    return [dict(np.load(path)) for path in sorted((directory / "values").iterdir())]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_iterations": 2, "max_training_steps": 4},
        {"mask_truncated_completions": True},
        {"lora": {"rank": 2, "dropout": 0.1}},
        pytest.param({"num_iterations": 2, "mask_truncated_completions": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_every_sampled_token_is_read_with_the_policy_that_sampled_it(tiny, model, tmp_path, train, changes):
    rows = train(temperature=0.9, **changes)
    (stage,) = open_run(tmp_path / "run").stages
    rollouts, found = [entry.rollout for entry in stage.rollouts()], values(tmp_path / "run")
    assert len(rollouts) == len(found) == BASE["max_training_steps"] - ("num_iterations" in changes)
    for rollout, each in zip(rollouts, found, strict=True):
        samples = rollout.samples
        assert not samples.finished.all()
        # The sampler says what the policy thinks of its tokens; the last updates' policy thinks otherwise.
        np.testing.assert_allclose(each["trainer_logps"], samples.logps[samples.mask], atol=2e-4)
        assert each["sums"][:, :3].tolist() == [[0, samples.version[0], samples.mask.sum()]]
        excess = -each["trainer_logps"].astype(np.float64) - each["entropies"]
        np.testing.assert_allclose(each["sums"][0, 3:5], [excess.sum(), each["variances"].sum()], rtol=1e-6)
        assert {name: x.dtype.name for name, x in each.items() if name != "rollout"} == {
            "trainer_logps": "float32",
            "entropies": "float32",
            "variances": "float32",
            "sums": "float64",
        }
    for row, each in zip(rows[:: 1 + ("num_iterations" in changes)], found, strict=True):
        tokens, excess, variance = each["sums"][0, 2:5]
        assert row["sampling/surprisal_gap"] == pytest.approx(excess / tokens)
        assert row["sampling/surprisal_z"] == pytest.approx(excess / np.sqrt(variance))
        assert abs(row["sampling/surprisal_z"]) < 4
        assert row["sampling/surprisal_evidence"] < 0


def of_seven_letters(prompts, completions):
    """0 for other prompts, whose groups are equal."""
    return [value * (len(prompt) == 7) for prompt, value in zip(prompts, early(completions), strict=True)]


@pytest.mark.parametrize("iterations", [1, 2])
def test_what_dynamic_sampling_drops_is_read_too(tiny, model, tmp_path, train, iterations):
    (row, *_) = train(
        rewards=[of_seven_letters],
        dynamic_sampling={"max_rounds": 3},
        num_iterations=iterations,
        max_training_steps=iterations,
    )
    (stage,) = open_run(tmp_path / "run").stages
    (rollout,) = [entry.rollout for entry in stage.rollouts()]
    (found,) = values(tmp_path / "run")
    assert row["dynamic_sampling/dropped"] + row["dynamic_sampling/surplus"] == len(rollout.dropped.prompts)
    table = np.concatenate([sampled_values.read(each, model) for each in (rollout, rollout.dropped)])
    np.testing.assert_allclose(found["sums"], [[0, 0, *sampled_values.sums(table)]], rtol=1e-4)
    assert len(found["trainer_logps"]) == rollout.samples.mask.sum() < len(table)
    assert row["sampling/surprisal_evidence"] < 0


def test_a_greedy_engine_ends_the_run_that_says_so_when_it_continues(train, tmp_path, capsys):
    begins = r"stopped after update 1 of 3: the completions are not drawn from the policy: over \d+ tokens of engine e0"
    with pytest.raises(
        RunError, match=begins + r".*version 0.*-\d\.\d+ nats.*likeliest cause: it samples greedily"
    ):
        train(sampler="greedy")
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()
    with pytest.raises(RunError, match="stopped after update 2 of 3"):
        train(sampler="greedy")
    assert "it begins again, with no evidence" in capsys.readouterr().err


@pytest.mark.parametrize("trainer", OTHERS)
def test_a_greedy_engine_ends_other_trainers(trainer, tiny, model, saved, tmp_path):
    """PPO reads every token anyway; the others read one of eight prompts for the test."""
    config = OTHERS[trainer].replace(sampler="greedy", max_training_steps=12, learning_rate=1e-12)
    inputs = {"rewards": [early], "train_dataset": tiny.prompts(12)}
    if trainer == "distill":
        config = config.replace(teacher_model=str(saved))
        inputs = {"train_dataset": tiny.texts(12)}
    with pytest.raises(RunError, match="the completions are not drawn from the policy"):
        tiny.run(trainer, config, tmp_path / "run", listeners=[Lies(), ppo], model=model, **inputs)
    (tmp_path / "run" / "metrics.jsonl").touch()  # it has no record, and may have ended before its first row
    (checks,) = audit(tmp_path / "run").values()
    assert "sampling test" in {check.name for check in checks if check.verdict == "FAIL"}
    (stage,) = open_run(tmp_path / "run").stages
    tested = 0
    for entry, found in zip(stage.rollouts(), values(tmp_path / "run"), strict=True):
        rollout = entry.rollout
        chosen = np.repeat(rollout.prompts % 8 == rollout.number % 8, rollout.group) | (trainer == "ppo")
        read = chosen[np.nonzero(rollout.samples.mask)[0]]
        assert np.isnan(found["trainer_logps"][~read]).all()
        assert len(found["sums"]) == read.any()
        if read.any():
            tested += 1
            sums = sampled_values.sums(sampled_values.read(rollout, model, temperature=0.9)[read])
            np.testing.assert_allclose(found["sums"][0, 2:], sums, rtol=1e-4, atol=1e-3)
    assert tested


def test_what_only_logs(train, tmp_path):
    """Without a tolerance, and with a penalty, whose distribution is not known."""
    rows = train(sampler="greedy", limits={"surprisal_gap": 0.0}, max_training_steps=2)
    assert min(row["sampling/surprisal_evidence"] for row in rows) > 9
    assert max(row["sampling/surprisal_gap"] for row in rows) < -0.5
    rows = train(at="penalty", max_training_steps=1, repetition_penalty=1.1)
    assert not any(name.startswith("sampling/surprisal") for name in rows[0])
    (found,) = values(tmp_path / "penalty")
    assert found["sums"].shape == (0, 11)
    assert np.isfinite(found["trainer_logps"]).all()


FILTERS = {"temperature": 0.9, "top_k": 8, "top_p": 0.95}


@pytest.mark.filterwarnings("ignore:.*filtered distribution")
def test_with_filters_some_prompts_are_held_to_what_these_leave(train, tmp_path):
    rows = train(**FILTERS)
    (stage,) = open_run(tmp_path / "run").stages
    tested = 0
    for row, entry, found in zip(rows, stage.rollouts(), values(tmp_path / "run"), strict=True):
        rollout = entry.rollout
        chosen = np.repeat(rollout.prompts % 8 == rollout.number, 8)
        tokens = int(rollout.samples.mask[chosen].sum())
        assert len(found["trainer_logps"]) == rollout.samples.mask.sum()
        assert found["sums"][:, 2].tolist() == [tokens] * bool(tokens)
        if not tokens:
            continue
        tested += 1
        assert row["sampling/outside"] == 0
        assert abs(row["sampling/surprisal_z"]) < 4
        assert row["sampling/surprisal_evidence"] < 0
        # Under the trainer's distribution tokens are likelier than it says.
        unfiltered = -found["trainer_logps"] - found["entropies"]
        assert unfiltered.sum() / np.sqrt(found["variances"].sum()) < -4
    assert tested


@pytest.mark.filterwarnings("ignore:.*filtered distribution")
def test_an_engine_that_filters_otherwise(train):
    with pytest.warns(
        UserWarning, match=r"of [\d,]+ sampled tokens are none that sampling.top_k and .*top_p allow"
    ):
        rows = train(sampler="unfiltered", at="unfiltered", **FILTERS)
    assert max(row.get("sampling/outside", 0) for row in rows) > 0.05
    with pytest.raises(RunError, match="the completions are not drawn from the policy"):
        train(sampler="greedy", max_completion_length=48, max_training_steps=6, **FILTERS)


def test_the_engine_that_lies_is_named(train, tmp_path):
    """Journals of versions that did not know engines are read as of the first one."""
    with pytest.raises(RunError, match="tokens of engine e1"):
        train(sampler="two_engines")
    (stage,) = open_run(tmp_path / "run").stages
    (rollout,) = [entry.rollout for entry in stage.rollouts()]
    assert rollout.samples.engine.tolist() == [0, 1] * 16
    arrays = rollout.arrays()
    del arrays["samples_engine"]
    old = Rollout.from_arrays(arrays, number=0, rounds=1, metrics={})
    assert old.samples.engine.tolist() == [0] * 32
    assert old.digest() == rollout.digest()
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["sampling/surprisal_evidence/e0"] < 0 < 9 < row["sampling/surprisal_evidence/e1"]
    (found,) = values(tmp_path / "run")
    assert found["sums"][:, 0].tolist() == [0, 1]
    assert found["rollout"].item() == rollout.digest()


FAILS = {"calls": 0}


def failing(completions):
    FAILS["calls"] += 1
    if FAILS["calls"] == 3:
        raise ConnectionError("no route")
    return early(completions)


def test_a_run_that_was_interrupted_writes_the_same_bytes_and_has_the_same_evidence(train, tmp_path):
    FAILS["calls"] = 0
    with pytest.raises(RunError, match="no route"):
        train(rewards=[failing])
    train(rewards=[failing])
    interrupted = tmp_path / "interrupted"
    shutil.move(tmp_path / "run", interrupted)
    whole = train(rewards=[failing])
    for path in sorted((tmp_path / "run" / "values").iterdir()):
        assert path.read_bytes() == (interrupted / "values" / path.name).read_bytes()
    lines = (interrupted / "metrics.jsonl").read_text().splitlines()
    name = "sampling/surprisal_evidence"
    assert [json.loads(line)[name] for line in lines] == [row[name] for row in whole]
