"""GRPO's updates with a NumPy sampler and a formula for a policy: what each trains on, and resuming."""

import json
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_grpo import GRPOConfig
from rlhf_grpo.advantages import Group
from rlhf_grpo.train import GRPOSteps, PolicyReader, _sampled, with_kept

from rlhf_core import data, hidden
from rlhf_core.errors import InputError, RunError
from rlhf_core.mesh import make_mesh
from rlhf_core.packing.rows import Layout
from rlhf_core.rollouts import Reward, RolloutCollector, RolloutUpdates
from rlhf_core.rollouts.journal import Entry, Journal, most_bytes, numbers
from rlhf_core.sampling import Rollouts
from rlhf_core.training import Context, Reference

RECORD = {"trainer": "grpo", "seed": 5, "config": {}, "inputs": {}, "code": {}, "versions": {}}
G, C = 3, 5
LAYOUT = Layout((32,), (2,), (6,), (30,))


def sampler(params, prompts, key, ids):
    """Completions that depend on the parameters, the prompts, the key and its numbers alone."""
    seed = [
        int(params),
        int(ids[0]),
        *np.asarray(jax.random.key_data(key)).tolist(),
        *(int(p.sum()) for p in prompts),
    ]
    draw = np.random.default_rng(seed)
    n = len(prompts) * G
    lengths = draw.integers(1, C + 1, n).astype(np.int32)
    there = np.arange(C) < lengths[:, None]
    tokens = np.where(there, draw.integers(3, 48, (n, C)), 0).astype(np.int32)
    logps = np.where(there, -draw.random((n, C)), 0).astype(np.float32)
    return Rollouts(tokens, lengths, logps, lengths < C)


def logps_and_entropies(params, batch):
    """A policy whose log-probability of a token is −token/50 − params, and its entropy the token."""
    tokens = jnp.take_along_axis(batch.rows.tokens, jnp.maximum(batch.trained, 0), axis=1)
    there = batch.trained >= 0
    return jnp.where(there, -tokens / 50 - params, 0.0), jnp.where(there, tokens, 0).astype(jnp.float32)


@pytest.fixture
def make(tiny, tmp_path):
    prompts = data.encode_prompts(data.load(tiny.prompts(8)), tiny.make_tokenizer(), max_prompt_length=16)
    everything = SimpleNamespace(
        devices=tiny.one_device,
        seed=5,
        is_main=True,
        name="policy",
        say=lambda line: None,
        mesh=tiny.one_device(),
        registry=None,
        inputs={},
        experiment=RECORD,
    )

    def length(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    def make(reference=None, reward=length, advantage=None, place=None, **options):
        """place: the directory of an earlier one, to continue with its journal."""
        stage = SimpleNamespace(**vars(everything))
        stage.dir = place or Path(tempfile.mkdtemp(dir=tmp_path))
        config = GRPOConfig(**{"total_batch_size": 6, "num_generations": G, "log_steps": 4, **options})
        rewards = [Reward("length", 1.0, reward() if isinstance(reward, type) else reward)]
        collector = RolloutCollector(
            stage,
            prompts,
            tiny.make_tokenizer(),
            sampler,
            rewards,
            _sampled(config),
        )
        if reference is not None and not hasattr(reference, "params"):
            reference = SimpleNamespace(
                params=reference, apart=True, equals=lambda params: False, moves=False
            )
        policies = PolicyReader(config, logps_and_entropies, reference, LAYOUT, tiny.one_device())
        advantage = advantage or Group(config.scale_rewards)
        steps = GRPOSteps(config, collector, advantage, policies, LAYOUT)
        context = Context(config, stage)
        updates = RolloutUpdates(context, collector, LAYOUT, steps, reference=reference)
        updates.config, updates.policies = config, policies
        return updates

    return make


def short_prompts_differ(prompts, completion_ids):
    """Only prompts of less than four words have groups that differ."""
    return [
        float(ids[0]) if len(prompt.split()) < 4 else 0.5
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


class Rising:
    """Asks for more at every call."""

    calls = 0

    def __call__(self, completion_ids):
        self.calls += 1
        return [float(len(ids) > self.calls) for ids in completion_ids]

    def snapshot(self):
        return {"calls": self.calls}

    def restore(self, kept):
        self.calls = kept["calls"]


def state(params):
    return SimpleNamespace(params=params, key=jax.random.key(3), step=params)


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


def test_the_kl_may_be_taken_from_the_rewards(make):
    plain, taxed = (
        content(
            make(reference=2, kl={"beta": 0.5, "name": "k1", "place": place}, scale_rewards="none").update(
                0, state(0)
            )
        )
        for place in ("loss", "reward")
    )
    rewards = []
    for i in range(3):
        tokens, _, values = taxed[i]
        kl = sum(s - r for s, r in zip(values["sampling_logps"], values["ref_logps"], strict=True))
        rewards.append(len(tokens) - 0.5 * kl)
    assert [taxed[i][1] for i in range(3)] == pytest.approx(
        (np.array(rewards) - np.mean(rewards)).tolist(), abs=1e-5
    )
    assert [plain[i][1] for i in range(3)] != [taxed[i][1] for i in range(3)]


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


def test_equal_kl_gives_no_advantage_whether_completions_finished_or_not(make):
    """Two completions of a group end by themselves, one is cut; KL and reward of all are equal."""

    def equal(params, prompts, key, ids):
        n = len(prompts) * G
        tokens = np.full((n, C), 7, np.int32)
        return Rollouts(
            tokens, np.full(n, C, np.int32), np.full((n, C), -1.0, np.float32), np.arange(n) % G > 0
        )

    feed = make(
        reference=2,
        kl={"beta": 0.2, "place": "reward"},
        mask_truncated_completions=True,
        scale_rewards="none",
    )
    feed.collector.rewards[0].function = lambda completions: [1.0] * len(completions)
    feed.collector = replace(feed.collector, sampler=equal)
    feed.update(0, state(0))
    assert feed.rollout.advantages.tolist() == [0.0] * 6


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


def test_epochs_rise_where_rollouts_take_different_rounds(make):
    rounds = iter([2, 1, 2, 1, 1, 1])

    def reward(completion_ids):
        if not left:
            left.append(next(rounds))
        left[0] -= 1
        differs = left[0] == 0
        if differs:
            left.clear()
        return [float(i) if differs else 1.0 for i, _ in enumerate(completion_ids)]

    left: list[int] = []
    feed = make(dynamic_sampling={"max_rounds": 2}, num_iterations=4, reward=reward, num_train_epochs=2)
    epochs = []
    for n in range(24):
        if n < feed.total:
            feed.update(n, state(0))
            epochs.append(feed.epochs(n + 1))
    drawn = np.cumsum(np.repeat([2, 1, 2, 1, 1, 1], 4) / 4) * 2 / 8
    assert epochs == pytest.approx(drawn[: len(epochs)].tolist())
    assert (len(epochs), epochs[-1]) == (24, 2.0)


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


@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_generation": 2, "num_iterations": 2, "reference": 9, "top_entropy_quantile": 0.5},
        {"num_iterations": 3, "entropy_coef": 0.1},
        {
            "num_iterations": 2,
            "reference": 9,
            "mask_truncated_completions": True,
            "top_entropy_quantile": 0.5,
            "kl": {"beta": 0.5, "place": "reward"},
        },
        pytest.param({"mask_truncated_completions": True}, marks=pytest.mark.long),
        {"reward": Rising},
        {"dynamic_sampling": {"max_rounds": 3}, "num_iterations": 2, "reward": short_prompts_differ},
        {"rollouts_ahead": 2, "reward": Rising},
        {
            "rollouts_ahead": 1,
            "dynamic_sampling": {"max_rounds": 3},
            "num_iterations": 2,
            "reward": short_prompts_differ,
            "num_train_epochs": 4,
        },
    ],
    ids=", ".join,
)
def test_resumed_at_any_update_the_rest_is_the_same(make, options):
    """Whether what was sampled after the checkpoint is sampled again, or the journal has it."""
    moving = [state(n) for n in range(9)]
    whole = make(**options)
    expected, kept = [], []
    for n in range(9):
        host, arrays = whole.snapshot(n)
        kept.append((host, {name: np.array(x) for name, x in arrays.items()}))
        expected.append(whole.update(n, moving[n]))
    for start in range(1, 9):
        feed = make(**options)
        shutil.copytree(whole.stage.dir / "journal", feed.stage.dir / "journal")
        if start % 4 > 1:
            feed.collector = replace(feed.collector, sampler=None)
        else:
            Journal(feed.stage.dir / "journal", [], writes=True).keep(before=kept[start][0]["sampled"])
        feed.restore(start, *kept[start])
        for n in range(start, 9):
            update = feed.update(n, moving[n])
            jax.tree.map(np.testing.assert_array_equal, list(update.batches), list(expected[n].batches))
            assert dict(update.metrics) == dict(expected[n].metrics)
            assert update.tokens == expected[n].tokens


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_rollouts_are_sampled_ahead_by_the_policy_of_a_fixed_update(make, ahead):
    """Rollout r by the policy after the updates of rollout r - ahead - 1, and with the prompts of round r."""
    feed = make(rollouts_ahead=ahead, num_iterations=2, max_training_steps=16)
    versions, prompts, lags = [], [], []
    for n in range(16):
        update = feed.update(n, state(n))
        lags.append(update.metrics.get("rollout/lag"))
        versions.append(set(feed.rollout.samples.version.tolist()))
        prompts.append(feed.rollout.prompts.tolist())
        assert sorted(feed.ready) == list(range(n // 2 + 1, min(n // 2 + ahead + 1, 8)))
    assert versions == [{2 * max(n // 2 - ahead, 0)} for n in range(16)]
    assert lags == [n - 2 * max(n // 2 - ahead, 0) if ahead else None for n in range(16)]
    order = data.batch_rows(8, 2, seed=5)
    assert prompts[::2] == [next(order).tolist() for _ in range(8)]


class Outside:
    """A sampler that publishes policies and samples in threads, when it is let."""

    def __init__(self):
        self.policies, self.retired, self.may_sample = {}, [], threading.Event()
        self.may_sample.set()

    def publish(self, params, version):
        self.policies[version] = params
        return version

    def published(self, version):
        assert version in self.policies
        return version

    def retire(self, before):
        self.retired.append(before)

    def __call__(self, version, prompts, key, ids):
        assert threading.current_thread() is not threading.main_thread()
        self.may_sample.wait()
        return sampler(self.policies[version], prompts, key, ids)


AHEAD = {"num_iterations": 2, "max_training_steps": 10}
ROUNDS = {"dynamic_sampling": {"max_rounds": 3}, "reward": short_prompts_differ}


@pytest.mark.parametrize("options", [{"reward": Rising}, ROUNDS], ids=["one round", "several"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_an_outside_sampler_gives_the_same_updates(make, ahead, options):
    """Sampled in threads, while rewards score one rollout after another; and killed while rollouts are sampled."""
    inside = make(rollouts_ahead=ahead, **AHEAD, **options)
    expected = [inside.update(n, state(n)) for n in range(10)]
    outside = Outside()
    feed = make(rollouts_ahead=ahead, **AHEAD, **options)
    feed.collector = replace(feed.collector, sampler=outside)

    def same(feed, steps):
        for n in steps:
            update = feed.update(n, state(n))
            jax.tree.map(np.testing.assert_array_equal, list(update.batches), list(expected[n].batches))
            assert dict(update.metrics) == dict(expected[n].metrics)

    same(feed, range(2))
    for flight in feed.flights.values():
        flight.land()
    outside.may_sample.clear()  # the last one, where several are ahead
    again = make(rollouts_ahead=ahead, **AHEAD, **options)
    later = Outside()
    later.policies = outside.policies
    again.collector = replace(again.collector, sampler=later)
    if not ahead:
        outside.may_sample.set()
    same(feed, range(2, 4))
    assert [*feed.flights] == ([2, 3] if ahead else [])
    host, arrays = feed.snapshot(4)
    shutil.copytree(feed.stage.dir / "journal", again.stage.dir / "journal")
    again.restore(4, json.loads(json.dumps(host)), arrays)
    outside.may_sample.set()
    same(again, range(4, 10))
    same(feed, range(4, 10))
    for retired in (outside.retired, later.retired):
        assert retired == sorted(retired)
        assert retired[-1] == 8 - 2 * ahead


def test_what_an_outside_sampler_raises_is_raised_where_the_rollout_is_needed(make):
    feed = make(rollouts_ahead=1, max_training_steps=4)
    outside = Outside()

    def fails(version, prompts, key, ids):
        if int(ids[0]) == 0 and version == 1:
            raise RunError("the engine is gone")
        return Outside.__call__(outside, version, prompts, key, ids)

    outside_call = SimpleNamespace(
        publish=outside.publish, published=outside.published, retire=outside.retire
    )
    feed.collector = replace(feed.collector, sampler=Calls(fails, outside_call))
    feed.update(0, state(0))
    feed.update(1, state(1))
    with pytest.raises(RunError, match="the engine is gone"):
        feed.update(2, state(2))
    with pytest.raises(
        RunError, match="the engine is gone"
    ):  # its rewards come after those of the one that failed
        feed.flights[3].land()
    assert numbers(feed.stage.dir / "journal") == [0, 1]


@pytest.mark.parametrize("outside", [False, True])
def test_evaluations_leave_the_state_of_rewards_as_it_was(make, outside):
    """And see that of the rollout that is trained on, however many were scored since."""
    feed = make(rollouts_ahead=2, reward=Rising)
    if outside:
        feed.collector = replace(feed.collector, sampler=Outside())
    (reward,) = feed.collector.rewards
    for n in range(2):
        feed.update(n, state(n))
    for flight in feed.flights.values():
        flight.land()
    before = reward.function.calls
    assert before == 4
    held_out = replace(feed.collector, sampler=sampler)
    for _ in range(2):
        found = held_out.sample(0, np.arange(2), jax.random.key(9), np.arange(6))
        assert found.total.tolist() == (found.samples.lengths > 3).tolist()
    assert reward.function.calls == before


class Calls:
    """A function with the methods of another object."""

    def __init__(self, function, methods):
        self.function = function
        self.__dict__.update(vars(methods))

    def __call__(self, *arguments):
        return self.function(*arguments)


def test_rewards_with_weights_score_in_the_trainer_s_thread(make):
    class OnDevices:
        def setup(self, stage):
            pass

        def __call__(self, completion_ids):
            assert threading.current_thread() is threading.main_thread()
            return [float(len(ids)) for ids in completion_ids]

    plain, feed = make(rollouts_ahead=1), make(rollouts_ahead=1, reward=OnDevices)
    feed.collector = replace(feed.collector, sampler=Outside())
    for n in range(4):
        updates = [each.update(n, state(n)) for each in (plain, feed)]
        jax.tree.map(np.testing.assert_array_equal, *(list(update.batches) for update in updates))


def test_rounds_that_were_not_needed_are_sampled_before_the_epochs_end(make):
    """With rollouts ahead that reserve all prompts, every prompt of the epochs is sampled, in rollouts or rounds."""
    feed = make(
        rollouts_ahead=2, dynamic_sampling={"max_rounds": 3}, num_train_epochs=3, reward=short_prompts_differ
    )
    n, rounds = 0, []
    while n < feed.total:
        feed.update(n, state(n))
        rounds.append(feed.rollout.rounds)
        n += 1
    assert feed.total == len(rounds)
    assert sum(rounds) - rounds[-1] < 12 <= sum(rounds)
    assert feed.epochs(n) == sum(rounds) / 4
    ledger = feed.ledger
    assert (ledger.training, ledger.used) == (0, 2 * n)
    assert ledger.used + ledger.equal + ledger.surplus == 2 * sum(rounds)


def loses_a_rollout(feed):
    del feed.ready[2]


def loses_a_minibatch(feed):
    feed.ledger.use(1)


def takes_a_round_twice(feed):
    feed.order.returned.append(0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (loses_a_rollout, "12 groups were planned, and these are known: 4 ready, 4 used"),
        (loses_a_minibatch, "-1 groups of the rollout before rollout 1 were in no update"),
        (takes_a_round_twice, "8 groups were planned, and these are known: 8 ready, 4 used"),
    ],
)
def test_groups_that_are_lost_or_there_twice_are_noticed(make, damage, said):
    feed = make(rollouts_ahead=2, steps_per_generation=2, max_training_steps=8)
    feed.update(0, state(0))
    damage(feed)

    def update_twice():
        for n in (1, 2):
            feed.update(n, state(n))

    with pytest.raises(RunError, match=said):
        update_twice()


def test_a_state_that_is_saved_after_an_error_continues_with_the_same_updates(make):
    """Of an advantage, after its rollout was scored; of the journal's disk; and of a sampler."""
    options = {"rollouts_ahead": 1, "reward": Rising, **ROUNDS}
    whole = make(**options)
    expected = [whole.update(n, state(n)) for n in range(5)]

    def broken(*arguments, **options):
        raise RunError("broken")

    for breaks in (
        lambda feed: setattr(feed.steps, "advantage", broken),
        lambda feed: setattr(feed.journal, "write", broken),
        lambda feed: setattr(feed, "collector", replace(feed.collector, sampler=broken)),
    ):
        feed = make(**options)
        for n in range(2):
            feed.update(n, state(n))
        breaks(feed)
        with pytest.raises(RunError, match="broken"):
            feed.update(2, state(2))
        host, arrays = feed.snapshot(2)
        again = make(place=feed.stage.dir, **options)
        again.restore(2, json.loads(json.dumps(host)), arrays)
        for n in range(2, 5):
            update = again.update(n, state(n))
            jax.tree.map(np.testing.assert_array_equal, list(update.batches), list(expected[n].batches))


def test_the_journal_of_another_experiment_is_not_used(make):
    first = make()
    first.update(0, state(0))
    same, other = make(place=first.stage.dir), make(place=first.stage.dir)
    assert same._open_journal().known == {0}
    other.stage.experiment = {**RECORD, "seed": 6}
    assert other._open_journal().known == frozenset()
    assert same._open_journal().known == frozenset()


def test_rollouts_that_a_checkpoint_holds_keep_the_prompts_that_they_had(make):
    """Rows were corrected, and that was accepted: the rollout in use and the one that is ready are older."""
    options = {"rollouts_ahead": 1, "num_iterations": 2, "max_training_steps": 8}
    first = make(**options)
    for n in range(3):
        first.update(n, state(n))
    host, arrays = first.snapshot(3)
    expected = [first.update(n, state(n)) for n in range(3, 8)]
    again = make(place=first.stage.dir, **options)
    again.stage.experiment = {**RECORD, "seed": 6}
    ids = [again.prompts.ids[i][::-1] for i in range(8)]
    again.prompts = again.steps.prompts = replace(again.prompts, ids=ids)
    again.collector = replace(again.collector, prompts=again.prompts)
    again.restore(3, host, arrays)
    for n in range(3, 8):
        same = jax.tree.map(
            np.array_equal, list(again.update(n, state(n)).batches), list(expected[n - 3].batches)
        )
        assert all(jax.tree.leaves(same)) == (n < 6)


def test_a_damaged_journal_is_named(make):
    first = make()
    first.update(0, state(0))
    (path,) = (first.stage.dir / "journal").glob("rollout-*")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"rollout-000000.zip is damaged .* delete it to sample"):
        make(place=first.stage.dir).update(0, state(0))


def test_the_journal_hides_secrets(make, monkeypatch):
    """Also in what JSON cannot hold, such as an object among a tool's arguments."""
    hidden.remember("s3cret-value")

    class Says:
        def __str__(self):
            return "the key s3cret-value"

    feed = make()
    feed.update(0, state(0))
    monkeypatch.setattr(type(feed.rollout), "rows", lambda rollout, rewards: [{"completion": Says()}])
    journal = Journal(feed.stage.dir / "journal", [0], writes=True)
    journal.write(Entry(feed.rollout, [0], {}), [])
    (row,) = journal.read(0).rollout.samples_read
    assert row["completion"].startswith("the key ")
    assert "s3cret" not in row["completion"]


def test_the_journal_is_pruned_to_what_checkpoints_need(make):
    """And is not larger than forecast."""
    feed = make(journal="until_checkpoint", max_training_steps=8)
    for n in range(6):
        feed.update(n, state(n))
    size = sum(path.stat().st_size for path in (feed.stage.dir / "journal").glob("rollout-*"))
    tokens = 6 * (2 * int(feed.prompts.sizes.max()) + 2 * G * C)
    assert size <= most_bytes(rollouts=6, completions=6 * 2 * G, tokens=tokens) < 3 * size
    (feed.stage.dir / "checkpoints" / "000004").mkdir(parents=True)
    feed.snapshot(6)
    assert sorted(path.name for path in (feed.stage.dir / "journal").glob("rollout-*")) == [
        f"rollout-{n:06d}.zip" for n in (4, 5)
    ]


def test_a_checkpoint_between_rollouts_holds_nothing(make):
    feed = make(num_iterations=2)
    feed.update(0, state(0))
    assert feed.snapshot(2) == (
        {
            "sampled": 1,
            "following": 1,
            "returned": [],
            "extra_rounds": 0,
            "flying": [],
            "ledger": {"training": 0, "used": 2, "equal": 0, "surplus": 0, "passed_over": 0},
            "rewards": {},
            "settled": {},
        },
        {},
    )
    assert feed.snapshot(1)[0]["rollout"] == 0


def test_a_moving_reference_is_part_of_the_checkpoint(make):
    options = {"sync_ref_model": True, "num_iterations": 2}
    mesh = make_mesh(devices=jax.devices()[:1])
    params = {"base": jax.numpy.arange(2.0), "w": jax.numpy.arange(3.0)}
    feed = make(reference=Reference(params, "base", mesh, moves=True), **options)
    feed.policies.reference.move({"base": params["base"], "w": 3 * params["w"]}, 0.5)
    host, arrays = feed.snapshot(0)
    assert list(arrays) == ["reference['w']"]
    other = make(reference=Reference({**params, "w": 0 * params["w"]}, "base", mesh, moves=True), **options)
    other.restore(0, host, arrays)
    np.testing.assert_array_equal(other.policies.reference.params["w"], [0, 2, 4])
    assert other.policies.reference.params["base"] is params["base"]


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


def test_nothing_to_train_on_has_no_quantile(make):
    """All completions truncated and masked."""
    feed = make(top_entropy_quantile=0.4, entropy_coef=0.1, mask_truncated_completions=True)
    blank = feed.shapes()[0]
    blank.token_values["entropies"] = np.zeros(blank.trained.shape, np.float32)
    batches = with_kept([blank], 0.4)
    assert not batches[0].token_values["kept"].any()


def test_no_two_rollouts_share_a_key(make):
    feed, keys = make(), []

    def listening(params, prompts, key, ids, draw=feed.collector.sampler):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return draw(params, prompts, key, ids)

    feed.collector = replace(feed.collector, sampler=listening)
    for step in range(4):
        feed.update(step, state(0))
    assert len(keys) == len(set(keys)) == 4
