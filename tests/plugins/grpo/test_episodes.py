"""GRPO with an environment, end to end on a tiny policy: what is trained on, kept, reported, refused and resumed."""

import json
import shutil
from itertools import pairwise
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rlhf_grpo import GRPOConfig

from rlhf_core import plugins
from rlhf_core.errors import RunError
from rlhf_core.rollouts import RolloutOptions, open_collector, open_rewards
from rlhf_core.runs import open_run
from rlhf_core.training import OnDevices
from tests.shared.interrupts import interrupt
from tests.shared.short_runs import Watch

WORLDS = '''
import asyncio
from dataclasses import dataclass

from rlhf_core import Turn


@dataclass
class Talk:
    """Answers `turns` completions; each is rewarded by its words of the first half of the alphabet."""

    turns: int = 3
    fails_at: int = -1
    said: int = 0

    def reset(self, row, seed):
        self.number, self.seed = row["number"], seed
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, completion):
        self.said += 1
        if self.number == self.fails_at:
            raise ValueError("no such game")
        reward = sum("a" <= word <= "m" for word in completion["content"].split()) / 6
        if self.said == self.turns:
            return Turn(reward=reward, done=True, metrics={"said": self.said})
        return Turn([{"role": "user", "content": "a b c"}], reward, metrics={"said": self.said})


class Slow(Talk):
    async def step(self, completion):
        await asyncio.sleep(0.001 * (self.seed % 7))
        return super().step(completion)


class Odd(Talk):
    """Begins with the first row alone."""

    def reset(self, row, seed):
        if row["number"]:
            raise ValueError("no such game")
        return super().reset(row, seed)
'''
BASE = {
    "learning_rate": 1e-2,
    "weight_decay": 0.0,
    "total_batch_size": 16,
    "num_generations": 4,
    "max_prompt_length": 40,
    "max_completion_length": 6,
    "max_training_steps": 2,
    "log_steps": 1,
    "chat_template": "plain",
}
"""Rollouts are of four prompts, as in `collect`, whose programs runs then have."""


@pytest.fixture
def worlds(tmp_path):
    path = tmp_path / "worlds.py"
    path.write_text(WORLDS)
    return path


@pytest.fixture
def config(worlds):
    def config(name="Talk", options=None, **changes):
        environment = {"name": f"{worlds}:{name}", "max_turns": 4, "max_tokens": 64, **(options or {})}
        return GRPOConfig(**{**BASE, "environment": environment, **changes})

    return config


@pytest.fixture
def train(tiny, model, tmp_path, config):
    def train(name="Talk", options=None, at="run", inputs=None, **changes):
        watch = Watch()
        given = config(name, options, **changes)
        inputs = {"model": model, "train_dataset": tiny.prompts(4), **(inputs or {})}
        run = tiny.run("grpo", given, tmp_path / at, listeners=[watch], **inputs)
        return SimpleNamespace(rows=watch.rows, directory=tmp_path / at, artifact=run)

    return train


@pytest.fixture
def collect(tiny, model, config, tmp_path):
    """Collect one rollout of all four prompts with the model as it is."""

    def collect(name="Talk", options=None, rows=None, **changes):
        made = config(name, options, **changes)
        stage = SimpleNamespace(
            name="policy",
            mesh=tiny.one_device(),
            template_date="2026-01-01",
            dir=tmp_path,
            seed=0,
            is_main=True,
            registry=plugins.load().registry,
            devices=tiny.one_device,
            say=lambda line: None,
            inputs={"train_dataset": rows or tiny.prompts(4), "model": model},
            replay=None,
        )
        context = OnDevices(made, stage)
        context.tokenizer = model.tokenizer
        rewards = open_rewards([], stage, environment=made.environment)
        options = RolloutOptions(made.max_prompt_length, 4, made.sampling, 4, environment=made.environment)
        collector = open_collector(context, model, rewards, options)
        rollout = collector.sample(
            model.params, np.arange(4), jax.random.key(3), np.arange(16), required=False
        )
        return collector, rollout

    return collect


def test_episodes_are_on_policy_and_report_metrics(train):
    run = train()
    first = run.rows[0]
    assert first["sampling/logp_difference_max"] < 1e-5
    assert first["episodes/turns"] == 3
    assert first["episodes/failed"] == first["episodes/cut_ratio"] == 0
    assert first["episodes/said"] == 2
    assert first["reward"] == pytest.approx(first["rewards/environment/mean"])
    lines = [
        json.loads(line)
        for line in (run.directory / "samples" / "update-000000.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 16
    for line in lines:
        roles = [message["role"] for message in line["completion"]]
        assert roles == ["assistant", "user"] * 2 + ["assistant"]
        assert line["prompt"][0]["role"] == "user"
        assert line["reward"] == pytest.approx(sum(turn["reward"] for turn in line["turns"]))
        assert line["length"] == sum(turn["tokens"] for turn in line["turns"])
        assert [turn["message"] for turn in line["turns"]] == [0, 2, 4]


def test_episodes_begin_with_the_next_rows_of_a_stream(train, tiny, monkeypatch):
    monkeypatch.setattr("rlhf_core.data.streams.SAMPLE", 3)
    rows = tiny.prompts(12)
    run = train(inputs={"train_dataset": lambda: iter(rows)}, shuffle_train_dataset=False)
    files = sorted((run.directory / "samples").glob("update-*.jsonl"))
    begun = [line["columns"]["number"] for file in files for line in tiny.read_rows(file)[::4]]
    assert begun == [row["number"] for row in rows[:8]]


def test_trained_tokens_are_those_that_were_sampled(collect, model):
    collector, rollout = collect()
    samples, said = rollout.samples, rollout.conversations
    encoder = collector.episodes.encoder
    trees = rollout.trees(collector.prompts)
    for i, turns in enumerate(said.turns):
        branch, weight = trees[i // 4].branches[i % 4], trees[i // 4].weights[i % 4]
        written = np.zeros(len(branch), bool)
        for turn in turns:
            written[turn.start : turn.end] = True
        assert np.array_equal(weight > 0, written)
        assert np.array_equal(samples.mask[i, : len(branch)], written)
        assert (samples.logps[i, : len(branch)][written] < 0).all()
        assert not samples.logps[i, : len(branch)][~written].any()
        # What the world added is what the template writes between the turns.
        between = [branch[a.end : b.start] for a, b in pairwise(turns)]
        decoded = [model.tokenizer.decode(ids) for ids in between]
        assert all("a b c" in text for text in decoded)
        assert len(branch) == turns[-1].end
    assert np.array_equal(trees[0].prefix, encoder.prompt(rollout.inputs.prompts[0]))


@pytest.mark.parametrize(("name", "options"), [("Slow", {}), ("Talk", {"processes": 1, "timeout": 30})])
def test_an_environment_that_waits_or_is_elsewhere_answers_alike(collect, name, options):
    _, plain = collect()
    _, other = collect(name, options)
    for field in ("tokens", "lengths", "logps", "mask", "finished"):
        assert np.array_equal(getattr(plain.samples, field), getattr(other.samples, field)), field
    assert np.array_equal(plain.total, other.total)


def test_failed_episodes_do_not_count_as_empty_completions(train, recwarn):
    run = train("Odd", max_training_steps=1)
    assert run.rows[0]["episodes/failed"] == 12
    assert not any("are empty" in str(each.message) for each in recwarn)


def test_an_episode_that_fails_is_reported_and_left_out(collect):
    with pytest.warns(UserWarning, match="4 of 16 episodes failed and are dropped") as warned:
        _, rollout = collect(options={"fails_at": 1})
    words = "row 2: environment 'worlds.py:Talk': step raised ValueError: no such game"
    assert any(words in str(each.message) for each in warned)
    failed = np.arange(4, 8)
    assert np.isnan(rollout.total[failed]).all()
    assert not rollout.samples.mask[failed].any()
    assert not np.isnan(np.delete(rollout.total, failed)).any()
    assert rollout.metrics["episodes/failed"] == 4


WRITTEN = 4
"""Tokens that the chat template adds to a prompt."""


def test_where_all_fail_the_run_ends(collect):
    rows = [{"prompt": " ".join(["a"] * (41 - WRITTEN)), "number": i} for i in range(4)]
    with pytest.raises(
        RunError, match=r"every episode of the rollout failed; the first: .* row 1.*a prompt of 41 tokens"
    ):
        collect(rows=rows)


def test_a_history_that_is_encoded_again_is_a_row_per_turn(collect):
    collector, rollout = collect(options={"history": "encoded_again"})
    trees, said = rollout.trees(collector.prompts), rollout.conversations
    assert rollout.samples.mask.sum() == rollout.samples.lengths.sum()
    every = [(i, turn) for i, turns in enumerate(said.turns) for turn in turns]
    assert len(trees) == len(every) == 48
    assert rollout.tree_groups() == [i // 4 for i, _ in every]
    for tree, (i, turn) in zip(trees, every, strict=True):
        history = rollout.inputs.prompts[i] + rollout.inputs.completions[i]
        before = history[: 1 + 2 * said.turns[i].index(turn)]
        assert np.array_equal(tree.prefix, collector.episodes.encoder.prompt(before))
        assert np.array_equal(tree.branches[0], rollout.samples.tokens[i, turn.start : turn.end])


@pytest.mark.parametrize("history", [pytest.param("kept", marks=pytest.mark.long), "encoded_again"])
def test_a_run_stopped_within_a_rollout_resumes_to_the_same_bits(
    tiny, train, model, tmp_path, config, history
):
    changes = {
        "total_batch_size": 8,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_training_steps": 6,
        "beta": 0.1,
    }
    options = {"history": history}
    whole = train(at="whole", options=options, **changes)
    assert whole.rows[0]["sampling/logp_difference_max"] < 1e-5
    part = tmp_path / "part"

    given = config("Talk", options, save_steps=2, **changes)
    with pytest.raises(KeyboardInterrupt):
        tiny.run("grpo", given, part, listeners=[interrupt(3)], model=model, train_dataset=tiny.prompts(4))
    artifact = tiny.run("grpo", given, part, model=model, train_dataset=tiny.prompts(4))
    ours, theirs = (
        (path / "model.safetensors").read_bytes() for path in (artifact.path, whole.artifact.path)
    )
    assert ours == theirs
    shutil.rmtree(part)


def test_a_reward_function_reads_the_conversation_in_training_and_evaluation(tiny, train):
    def turns(completions, environment_rewards):
        assert len(environment_rewards) == len(completions)
        return [float(sum(m["role"] == "assistant" for m in each)) for each in completions]

    inputs = {"rewards": [turns], "eval_dataset": tiny.prompts(4, seed=1)}
    evaluation = {"num_generations": 4}  # as in training, so that both sample with one program
    run = train(options={"weight": 0.5}, inputs=inputs, evaluation=evaluation, max_training_steps=1)
    metrics = {name: number for row in run.rows for name, number in row.items()}
    for prefix in ("", "eval_"):
        assert metrics[f"{prefix}rewards/turns/mean"] == 3
        assert metrics[f"{prefix}episodes/turns"] == 3
        own = metrics[f"{prefix}rewards/environment/mean"]
        assert metrics[f"{prefix}reward"] == pytest.approx(3 + 0.5 * own)


@pytest.mark.parametrize("history", ["kept", "encoded_again"])
def test_the_tokens_of_failed_episodes_are_tested_like_the_others(train, history):
    """And those of several turns, each of which may be a row of its own."""
    run = train(options={"fails_at": 1, "history": history})
    (stage,) = open_run(run.directory).stages
    for entry, path in zip(stage.rollouts(), sorted((run.directory / "values").iterdir()), strict=True):
        samples, found = entry.rollout.samples, np.load(path)
        np.testing.assert_allclose(found["trainer_logps"], samples.logps[samples.mask], atol=2e-4)
        turns = [turn for turns in entry.rollout.conversations.turns for turn in turns]
        written = sum(turn.end - turn.start for turn in turns)
        assert found["sums"][:, 2].tolist() == [written]
        assert written > samples.mask.sum() > 0
