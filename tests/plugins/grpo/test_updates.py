"""What GRPO's updates train on, with a NumPy sampler and a formula for a policy."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.sampling import Rollouts
from rlhf_core.training import Reference
from tests.shared.updates import C, G, sampler, state


def advantage_of(by_token):
    """The advantage of a completion, all of whose tokens have the same."""
    assert len(set(by_token)) <= 1
    return by_token[0] if by_token else 0.0


def content(update):
    """{completion's tokens: (advantage, its token values by name)} of an update, and the prompts' order."""
    found = {}
    for batch in update.batches:
        for row, place in zip(*np.nonzero(batch.last >= 0), strict=True):
            at = np.flatnonzero(batch.rows.sequence[row] == place)
            mine = np.isin(batch.trained[row], at) & (batch.trained[row] >= 0)
            values = {name: x[row][mine].tolist() for name, x in batch.token_values.items()}
            index = int(batch.sequence_values["index"][row, place])
            found[index] = (
                batch.rows.tokens[row, at].tolist(),
                advantage_of(values.pop("advantages")),
                values,
            )
    return found


def test_rollouts_that_teach_nothing_are_reported_once(make, recwarn):
    """A reward that is flat three times in a row; not before, and not again."""
    flat = [False, True, True, False, True, True, True, True, True]

    def reward(completion_ids):
        same = flat[len(drawn)]
        drawn.append(same)
        return [0.25 if same else float(i) for i, _ in enumerate(completion_ids)]

    drawn, told = [], []
    feed = make(reward=reward)
    for number in range(len(flat)):
        feed.update(number * feed.config.updates_per_rollout, state(0))
        told.append(sum("nothing is learned" in str(each.message) for each in recwarn))
    assert told == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    (message,) = [str(each.message) for each in recwarn if "nothing is learned" in str(each.message)]
    assert message.startswith("stage 'policy': in 3 consecutive rollouts, every group got the same reward")
    assert "0.25 on average" in message
    assert str(feed.stage.dir / "samples") in message


def test_counts(make):
    feed = make(num_train_epochs=2, steps_per_generation=2, num_iterations=3)
    # A rollout has 12 completions of 4 prompts and serves 6 updates; 2 epochs of 8 prompts are 4 rollouts.
    assert (feed.total, feed.epochs(12)) == (24, 1)
    assert make(max_training_steps=5).total == 5
    assert make(num_train_epochs=1, total_batch_size=9).total == 3  # the third rollout wraps around


def test_an_update_trains_on_its_part_of_a_rollout_and_comes_again_the_next_iteration(make):
    feed = make(steps_per_generation=2, num_iterations=2)
    moving = [state(n) for n in range(8)]  # the policy changes with every update
    needs = []
    updates = []
    for n in range(8):
        needs.append(feed.needs_state(n))
        updates.append(content(feed.update(n, moving[n])))
    assert needs == [True, False, False, False] * 2
    assert [sorted(u) for u in updates] == [[*range(6)], [*range(6, 12)]] * 4
    assert updates[0] == updates[2]
    assert updates[1] == updates[3]
    assert updates[0] != updates[4]
    for n, update in enumerate(updates):
        for tokens, _, values in update.values():
            started = 0 if n < 4 else 4  # old log-probabilities are those of the rollout's own policy
            assert values["old_logps"] == pytest.approx([-t / 50 - started for t in tokens], abs=1e-6)


def test_with_one_update_a_rollout_no_old_log_probabilities_are_kept(make):
    feed = make()
    always = {"sampling_logps", "advantages"}

    def names(updates):
        (names,) = {tuple(sorted(batch.token_values)) for batch in updates.shapes()}
        return set(names) - always

    batches = feed.update(0, state(0)).batches
    assert all(set(batch.token_values) == always for batch in batches)
    assert names(feed) == set()
    assert names(make(num_iterations=2)) == {"old_logps"}
    assert names(make(reference=9, top_entropy_quantile=0.5)) == {"ref_logps", "kept"}


def test_every_shape_is_known_before(make):
    feed = make(reference=9, num_iterations=2, top_entropy_quantile=0.5, entropy_coef=0.1)

    def shapes(batch):
        return jax.tree.map(lambda x: (x.shape, x.dtype), batch)

    known = [shapes(batch) for batch in feed.shapes()]
    assert all(shapes(batch) in known for n in range(2) for batch in feed.update(n, state(0)).batches)


def test_advantages_are_those_of_whole_groups(make):
    update = content(make(steps_per_generation=2).update(0, state(0)))
    for first in (0, 3):
        rewards = np.array([len(update[i][0]) for i in range(first, first + G)], float)
        spread = rewards.std(ddof=1)
        expected = (rewards - rewards.mean()) / (spread + 1e-4) if np.ptp(rewards) else 0 * rewards
        assert [update[i][1] for i in range(first, first + G)] == pytest.approx(expected.tolist(), abs=1e-6)


def reference_values(update):
    return np.concatenate([batch.token_values["ref_logps"].ravel() for batch in update.batches])


def test_as_long_as_the_policy_is_the_reference_its_own_numbers_are_used(make, tiny):
    """Nothing is compared any more once it has moved, until the reference moves there too."""
    params = [{"w": jax.device_put(np.float32(n))} for n in range(2)]
    reference = Reference(params[0], None, tiny.one_device())
    feed = make(reference=reference, num_iterations=2)
    feed.policies.read = lambda trees, params: {
        name: [np.full(len(b), -2.0) for tree in trees for b in tree.branches]
        for name in ("old_logps", "ref_logps")
    }
    feed.collector = replace(feed.collector, sampler=lambda params, *rest: sampler(int(params["w"]), *rest))

    def update(n, moved):
        return reference_values(
            feed.update(n, SimpleNamespace(**{**state(0).__dict__, "params": params[moved]}))
        )

    assert feed.needs_state(0)
    assert np.isnan(update(0, 0)).all()
    assert feed.needs_state(1)
    assert np.isnan(update(1, 0)).all()
    assert not np.isnan(update(2, 1)).any()
    assert not feed.needs_state(3)
    assert not np.isnan(update(3, 0)).any()
    reference.move(params[1], 0.9)
    assert not np.isnan(update(4, 0)).any()
    reference.move(params[1], 1.0)
    assert np.isnan(update(5, 1)).all()


def test_the_kl_in_the_reward_is_0_where_the_policy_is_the_reference(make):
    options = {
        "kl": {"beta": 0.5, "place": "reward"},
        "reward": lambda completion_ids: [1.0] * len(completion_ids),
    }
    feed = make(reference=2, **options)
    feed.policies.reference.equals = lambda params: True
    assert {advantage for _, advantage, _ in content(feed.update(0, state(0))).values()} == {0.0}


@pytest.mark.parametrize("masked", [False, True])
def test_completions_masked_in_the_loss_have_their_whole_kl_in_the_reward(make, masked):
    """By the formula, in float64: reward − β Σ over all tokens of the completion, then the mean of the group."""
    feed = make(
        reference=2,
        kl={"beta": 0.5, "name": "k3", "place": "reward"},
        scale_rewards="none",
        mask_truncated_completions=masked,
        total_batch_size=24,
    )
    feed.update(0, state(0))
    samples = feed.rollout.samples
    assert 0 < np.count_nonzero(~samples.finished) < len(samples.lengths)
    there = np.arange(C) < samples.lengths[:, None]
    d = (-samples.tokens / 50 - 2) - samples.logps.astype(np.float64)
    kl = np.where(there, np.exp(d) - d - 1, 0).sum(1)
    total = (samples.lengths - 0.5 * kl).reshape(-1, G)
    expected = (total - total.mean(1, keepdims=True)).reshape(-1)
    np.testing.assert_allclose(feed.rollout.advantages, expected, rtol=0, atol=1e-5)
    trained = {
        int(batch.sequence_values["index"][row, batch.rows.sequence[row, at]])
        for batch in feed.packed[0]
        for row, at in zip(np.nonzero(batch.trained >= 0)[0], batch.trained[batch.trained >= 0], strict=True)
    }
    assert trained == set(np.flatnonzero(samples.finished | (not masked)).tolist())


def test_epochs_count_the_prompts_that_dynamic_sampling_drew(make):
    """Eight prompts, two a round: with two rounds a rollout, two rollouts are an epoch."""
    feed = make(dynamic_sampling={"max_rounds": 2}, num_iterations=2, reward=flat_reward, num_train_epochs=2)
    assert (feed.total, feed.epochs(16)) == (16, 2)
    epochs = []
    for n in range(8):
        feed.update(n, state(0))
        epochs.append(feed.epochs(n + 1))
    assert epochs == pytest.approx([0.25 * (n + 1) for n in range(8)])
    assert feed.total == 8  # two epochs were drawn: the run ends here
    host, arrays = feed.snapshot(7)
    again = make(dynamic_sampling={"max_rounds": 2}, num_iterations=2, reward=flat_reward, num_train_epochs=2)
    again.restore(7, host, arrays)
    assert (again.total, again.epochs(7)) == (8, pytest.approx(1.75))
    fixed = make(dynamic_sampling={"max_rounds": 2}, reward=flat_reward, max_training_steps=5)
    for n in range(5):
        fixed.update(n, state(0))
    assert fixed.total == 5


def flat_reward(completion_ids):
    return [1.0] * len(completion_ids)


def test_empty_completions_are_reported_once(make, recwarn):
    feed = make()

    def stops_at_once(params, prompts, key, ids):
        return Rollouts(
            np.ones((len(ids), 1), np.int32),  # </s>
            np.ones(len(ids), np.int32),
            np.zeros((len(ids), 1), np.float32),
            np.ones(len(ids), bool),
        )

    feed.collector = replace(feed.collector, sampler=stops_at_once)
    for number in range(2):
        feed.update(number, state(0))
    (message,) = [str(each.message) for each in recwarn if "are empty" in str(each.message)]
    assert message.startswith("stage 'policy': 6 of 6 completions are empty")
    assert "messages" in message
    other = make()
    other.update(0, state(0))
    assert sum("are empty" in str(each.message) for each in recwarn) == 1


def test_tokens_and_places(make):
    update = make().update(0, state(0))
    groups = [tokens for tokens, _, _ in content(update).values()]
    feed = make()
    order = next(data.batch_rows(8, 2, seed=5))
    feed.update(0, state(0))
    assert [update.where(i) for i in range(2)] == [feed.prompts.where(int(i)) for i in order]
    prompt_tokens = sum(len(feed.prompts.ids[i]) for i in order)
    assert update.tokens == prompt_tokens + sum(map(len, groups))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"log_steps": 1}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"log_steps": 4}, [0, 3, 7]),
        ({"log_steps": 4, "num_iterations": 2}, [0, 2, 6]),
        ({"log_steps": 3, "num_iterations": 2, "steps_per_generation": 2}, [0, 4]),
    ],
)
def test_samples_are_written_of_every_rollout_that_is_logged(make, options, steps):
    feed = make(**options)
    for n in range(8):
        feed.update(n, state(n))
    assert sorted(p.name for p in (feed.stage.dir / "samples").iterdir()) == [
        f"update-{n:06d}.jsonl" for n in steps
    ]


def test_the_entropy_quantile_is_over_all_micro_batches(make):
    feed = make(top_entropy_quantile=0.4)
    update = content(feed.update(0, state(0)))
    tokens = np.array([t for own, _, _ in update.values() for t in own])
    kept = np.array([k for _, _, values in update.values() for k in values["kept"]])
    np.testing.assert_array_equal(kept, tokens >= np.quantile(tokens, 0.6))


def test_no_two_rollouts_share_a_key(make):
    feed, keys = make(), []

    def listening(params, prompts, key, ids, draw=feed.collector.sampler):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return draw(params, prompts, key, ids)

    feed.collector = replace(feed.collector, sampler=listening)
    for step in range(4):
        feed.update(step, state(0))
    assert len(keys) == len(set(keys)) == 4
