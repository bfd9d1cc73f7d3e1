"""Online DPO: which completions are pairs, what an update trains on, and updates without a pair."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rlhf_dpo import OnlineDPOConfig, OnlineDPOTrainer
from rlhf_dpo.online import OnlineDPOSteps, choose_pairs

from rlhf_core import Rollouts, load_model
from rlhf_core.packing import Layout
from rlhf_core.rollouts import Rollout
from rlhf_core.runs import open_run
from tests.shared import reference
from tests.shared.short_runs import early

NONE = np.nan
BETA, RATE = 0.3, 0.05
BASE = {
    "learning_rate": RATE,
    "optimizer": "sgd",
    "max_grad_norm": None,
    "weight_decay": 0.0,
    "total_batch_size": 12,
    "num_generations": 3,
    "max_completion_length": 6,
    "beta": BETA,
    "log_steps": 1,
    "num_preview_samples": 0,
}
LAYOUT = Layout((32,), (2,), (4,), (32,))


def odd(completion_ids, number):
    """Of prompts with an odd number alone: whether the first token is odd."""
    return [float(ids[0] % 2) if n % 2 else None for ids, n in zip(completion_ids, number, strict=True)]


def train(tiny, directory, rewards, **changes):
    config = OnlineDPOConfig(**{**BASE, "save_directory": str(directory), **changes})
    rows = tiny.prompts(9)
    model = tiny.make_model("lm", scale=4.0)
    result = OnlineDPOTrainer(config, model=model, rewards=rewards, train_dataset=rows).train()
    after = load_model(result.artifact.path, mesh=tiny.one_device())
    return SimpleNamespace(
        before=reference.as_float64(model.params),
        after=reference.as_float64(after.params),
        logged=tiny.read_rows(directory / "metrics.jsonl"),
    )


def best_and_worst(rewards):
    """The places of the first best and the first worst of rewards, None where there is no pair; by comparing all."""
    known = [(value, place) for place, value in enumerate(rewards) if not np.isnan(value)]
    best = worst = known[0] if known else (0.0, 0)
    for each in known:
        best = each if each[0] > best[0] else best
        worst = each if each[0] < worst[0] else worst
    return None if best[0] - worst[0] < 1e-12 else (best[1], worst[1])


def test_the_best_and_the_worst_are_chosen():
    draw = np.random.default_rng(0)
    drawn = draw.integers(-2, 3, (300, 4)).astype(float)
    drawn[draw.random(drawn.shape) < 0.4] = NONE
    by_hand = [
        [1.0, 3.0, 2.0, 0.0],
        [2.0, 2.0, 2.0, 2.0],
        [NONE, 1.0, NONE, NONE],
        [NONE, NONE, NONE, NONE],
        [0.1 + 0.2, 0.3, NONE, 0.3],
        [NONE, 1e8, NONE, 1e8 + 1],
        [3.0, 1.0, 3.0, 1.0],
        [-1e38, NONE, 1e38, 0.0],
    ]
    total = np.concatenate([by_hand, drawn])
    expected = np.zeros(total.shape)
    for row, rewards in enumerate(total):
        pair = best_and_worst(rewards)
        if pair is not None:
            expected[row, pair[0]], expected[row, pair[1]] = 1, -1
    found = choose_pairs(total)
    np.testing.assert_array_equal(found, expected)
    assert [row.tolist().count(0.0) for row in found[:8]] == [2, 4, 4, 4, 4, 2, 2, 2]


def loss_of(params, start, pairs, config):
    """The mean over pairs of −log σ(β h), in float64."""
    values = []
    for prompt, *sides in pairs:
        of = [np.concatenate([prompt, side]) for side in sides]
        a, b = (
            (reference.logps(params, config, ids) - reference.logps(start, config, ids))[
                len(prompt) - 1 :
            ].sum()
            for ids in of
        )
        values.append(np.logaddexp(0, -BETA * (a - b)))
    return float(np.mean(values))


def test_an_update_has_the_loss_and_the_gradient_of_the_journals_tokens(tiny, tmp_path):
    """Of two functions, one of which applies to some prompts; once the policy has left the reference."""
    weights = [1.0, -0.5]
    runs = [
        train(tiny, tmp_path / str(n), [early, odd], reward_weights=weights, max_training_steps=n)
        for n in (1, 2)
    ]
    start, before, after = runs[0].before, runs[0].after, runs[1].after
    rollout = [entry.rollout for entry in open_run(tmp_path / "2").stages[0].rollouts()][1]
    pairs, tied = [], 0
    for prompt, ids in enumerate(rollout.prompt_ids):
        members = range(3 * prompt, 3 * prompt + 3)
        each = rollout.rewards[members]
        pair = best_and_worst(np.nansum(each * weights, axis=1))
        tied += pair is None
        if pair is not None:
            sides = [rollout.samples.tokens[members[i], : rollout.samples.lengths[members[i]]] for i in pair]
            pairs.append((ids, *sides))
    row = runs[1].logged[1]
    assert np.isnan(rollout.rewards).any()
    assert len(pairs) > 0
    assert row["frac_tied"] == tied / 4
    assert row["frac_unscored"] == 0
    sizes = {**tiny.SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    assert row["loss"] == pytest.approx(loss_of(before, start, pairs, sizes), rel=2e-5)
    assert abs(row["loss"] - np.log(2)) > 1e-4
    draw = np.random.default_rng(1)
    for _ in range(2):
        direction = reference.random_direction(before, draw)
        up, down = (
            loss_of(reference.move(before, direction, by), start, pairs, sizes) for by in (1e-6, -1e-6)
        )
        moved = (reference.inner(before, direction) - reference.inner(after, direction)) / RATE
        assert moved == pytest.approx((up - down) / 2e-6, rel=2e-3, abs=2e-4 * row["grad_norm"])
    sampled = tiny.read_rows(tmp_path / "2" / "samples" / "update-000001.jsonl")
    assert [line["advantage"] for line in sampled] == [
        x for i in range(4) for x in choose_pairs(rollout.total.reshape(-1, 3))[i]
    ]


def test_updates_without_a_pair_move_nothing(tiny, tmp_path):
    """All rewards are equal, or none is known but that of one completion."""
    calls = []

    def flat(completions):
        calls.append(1)
        known = [0.7] if len(calls) > 1 else [0.7] * len(completions)
        return [*known, *[None] * (len(completions) - len(known))]

    run = train(tiny, tmp_path, [flat], max_training_steps=2, optimizer="adamw")
    assert [row["frac_tied"] for row in run.logged] == [1.0, 0.0]
    assert [row["frac_unscored"] for row in run.logged] == [0.0, 1.0]
    assert [row["loss"] for row in run.logged] == [0.0, 0.0]
    assert [row["grad_norm"] for row in run.logged] == [0.0, 0.0]
    for name, leaf in tiny.leaves(run.before).items():
        np.testing.assert_array_equal(leaf, tiny.leaves(run.after)[name])


def rollout_of(total, lengths):
    """A rollout of prompts of one to P tokens with these rewards, [P, n]; its reference says −token/50."""
    count, width = total.size, int(lengths.max())
    there = np.arange(width) < lengths[:, None]
    tokens = np.where(there, np.arange(3, 3 + count * width).reshape(count, width), 0).astype(np.int32)
    samples = Rollouts(tokens, lengths, np.where(there, -1.0, 0.0).astype(np.float32), lengths < width)
    return Rollout(
        np.arange(len(total)),
        samples,
        total.reshape(-1, 1),
        total.reshape(-1),
        prompt_ids=[np.ones(n + 1, np.int32) for n in range(len(total))],
    )


def reads_tokens(params, trees):
    return [(-branch / 50).astype(np.float32) for tree in trees for branch in tree.branches]


READING = SimpleNamespace(reader=reads_tokens, params=lambda params: params)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("reading", [READING, None], ids=["reference", "none"])
def test_a_minibatch_has_its_prompts_pairs(minibatches, reading):
    total = np.array([[0.0, 2.0, 1.0], [1.0, 1.0, 1.0], [NONE, 0.5, -0.5], [5.0, 4.0, 5.0]])
    rollout = rollout_of(total, np.array([1, 4, 2, 3, 3, 3, 4, 2, 1, 4, 4, 2], np.int32))
    steps = OnlineDPOSteps(None, LAYOUT, minibatches, reading)
    prepared = steps.prepare(rollout, SimpleNamespace(params=None))
    assert (prepared.metrics["frac_tied"], prepared.metrics["frac_unscored"]) == (0.25, 0.0)
    expected = {0: (1, 0), 2: (7, 8), 3: (9, 10)}
    found = {}
    packed = steps.minibatches(prepared)
    for number, batches in enumerate(packed):
        for batch in batches:
            for row, place in zip(*np.nonzero(batch.last[:, 0::2] >= 0), strict=True):
                pair = [2 * place, 2 * place + 1]
                prompts = batch.example[row, pair] + number * 4 // minibatches
                assert prompts[0] == prompts[1]
                index = batch.sequence_values["index"][row, pair].astype(int)
                found[int(prompts[0])] = tuple(index.tolist())
                tokens = [rollout.samples.tokens[i, : rollout.samples.lengths[i]] for i in index]
                in_row = batch.rows.tokens[row], batch.rows.sequence[row]
                for place_of, own in zip(pair, tokens, strict=True):
                    np.testing.assert_array_equal(in_row[0][in_row[1] == place_of][-len(own) :], own)
                np.testing.assert_array_equal(
                    batch.sequence_values["tokens"][row, pair], [len(t) for t in tokens]
                )
                sums = [-t.sum() / 50 if reading else 0.0 for t in tokens]
                np.testing.assert_allclose(batch.sequence_values["reference"][row, pair], sums, rtol=1e-6)
    assert found == expected
    again = Rollout.from_arrays(prepared.arrays(), number=0, rounds=1, metrics=prepared.metrics)
    for ours, theirs in zip(packed, steps.minibatches(again), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.rows.tokens, b.rows.tokens)
            for name, values in a.sequence_values.items():
                np.testing.assert_array_equal(values, b.sequence_values[name])
    alike = replace(rollout, total=np.ones(12))
    for batches in steps.minibatches(steps.prepare(alike, SimpleNamespace(params=None))):
        assert [(batch.last >= 0).any() for batch in batches] == [False]
