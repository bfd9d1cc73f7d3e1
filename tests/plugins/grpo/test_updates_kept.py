"""GRPO's rollouts that are sampled ahead, journalled and continued, with a NumPy sampler and a formula for a policy."""

import io
import json
import random
import shutil
import threading
import tracemalloc
import zipfile
from dataclasses import replace

import jax
import numpy as np
import pytest

from rlhf_core import data, hidden
from rlhf_core.errors import InputError, RunError
from rlhf_core.mesh import make_mesh
from rlhf_core.rollouts.journal import Journal, JournalEntry, most_bytes
from rlhf_core.runtime.rollout_files import MANIFEST, rollout_numbers
from rlhf_core.training import Reference
from tests.shared.specs import recorded_as
from tests.shared.updates import RECORD, C, G, Rising, sampler, short_prompts_differ, state


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


def test_the_journal_of_another_experiment_is_not_used_nor_where_a_run_does_not_resume(make):
    first = make()
    first.update(0, state(0))
    same, other = make(place=first.stage.dir), make(place=first.stage.dir)
    assert same._open_journal().known == {0}
    other.stage.specification = lambda: recorded_as({**RECORD, "seed": 6})
    assert other._open_journal().known == frozenset()
    assert same._open_journal().known == frozenset()
    first.update(0, state(0))
    anew = make(place=first.stage.dir, checkpoints={"resume": False})
    assert anew._open_journal().known == frozenset()


@pytest.mark.parametrize("start", [3, 4, 7, 9])
def test_groups_are_counted_where_a_run_starts_after_a_pass_over_the_prompts(make, start):
    """Eight prompts, two of them in an update: from the fifth update on it is the second pass, and so on."""
    feed = make(max_training_steps=12)
    for n in range(start, 12):
        feed.update(n, state(n))
    assert feed.ledger.passed_over == 2 * start
    assert feed.ledger.used == 2 * (12 - start)


def test_rollouts_that_a_checkpoint_holds_keep_the_prompts_that_they_had(make):
    """Rows were corrected, and that was accepted: the rollout in use and the one that is ready are older."""
    options = {"rollouts_ahead": 1, "num_iterations": 2, "max_training_steps": 8}
    first = make(**options)
    for n in range(3):
        first.update(n, state(n))
    host, arrays = first.snapshot(3)
    expected = [first.update(n, state(n)) for n in range(3, 8)]
    again = make(place=first.stage.dir, **options)
    again.stage.specification = lambda: recorded_as({**RECORD, "seed": 6})
    ids = again.prompts.ids
    other = type(ids)([each[::-1] for each in ids], np.arange(8), np.zeros(8, int), ids.lengths)
    again.prompts = again.steps.prompts = replace(again.prompts, sequences={"ids": other})
    again.collector = replace(again.collector, prompts=again.prompts)
    again.restore(3, host, arrays)
    for n in range(3, 8):
        same = jax.tree.map(
            np.array_equal, list(again.update(n, state(n)).batches), list(expected[n - 3].batches)
        )
        assert all(jax.tree.leaves(same)) == (n < 6)


def without_manifest(content: bytes) -> bytes:
    """Write a rollout's file as earlier versions did."""
    return zipped({name: each for name, each in unzipped(content).items() if name != MANIFEST})


def unzipped(content):
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def zipped(members):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, each in members.items():
            file.writestr(name, each)
    return content.getvalue()


def contents(entry):
    """What a rollout's file holds, as text."""
    return repr((entry.taken, entry.rewards, entry.rollout.metrics, entry.rollout.samples_read)) + repr(
        {name: (array.dtype, array.tolist()) for name, array in entry.rollout.arrays().items()}
    )


@pytest.mark.parametrize("written", [bytes, without_manifest], ids=["now", "by earlier versions"])
def test_a_rollout_is_read_as_it_was_written_or_refused(make, written):
    feed = make()
    feed.update(0, state(0))
    directory = feed.stage.dir / "journal"
    path = directory / "rollout-000000.zip"
    content = written(path.read_bytes())
    path.write_bytes(content)
    journal = Journal(directory, [0], writes=True)
    whole = contents(journal.read(0))
    draw, refused = random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            read = contents(journal.read(0))
        except InputError as error:
            read = str(error)
            refused += 1
        assert read == whole or f"{path} is damaged" in read
    assert refused > 200


BAD_MEMBERS = {
    "a list": {"rollout.json": b"[]"},
    "null": {"samples.json": b"null"},
    "nested": {"samples.json": b"[" * 100_000},
    "not UTF-8": {"rollout.json": b"\xff\xfe{"},
    "a large number": {"rollout.json": b'{"rounds": 1' + b"0" * 5000 + b"}"},
    "8 TB": {"total.npy": None},
    "another member": {"rollout.jsoN": b"{}"},
    "unpacks to far more": {"large.npy": bytes(400_000_000)},
}


@pytest.mark.parametrize("bad", BAD_MEMBERS)
@pytest.mark.parametrize("lists", [True, False], ids=["with a manifest", "without one"])
def test_a_rollout_with_other_members_is_refused(bad, lists, make, monkeypatch):
    monkeypatch.setattr("rlhf_core.runtime.rollout_files.PLAIN", (2**20, 200))
    feed = make()
    feed.update(0, state(0))
    path = feed.stage.dir / "journal" / "rollout-000000.zip"
    members = {**unzipped(path.read_bytes()), **BAD_MEMBERS[bad]}
    if bad == "8 TB":
        header = io.BytesIO()
        about = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(header, about)
        members["total.npy"] = header.getvalue()
    if not lists:
        del members[MANIFEST]
    path.write_bytes(zipped(members))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"rollout-000000.zip is damaged .* restore it, or delete it"):
        Journal(path.parent, [0], writes=False).read(0)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def test_other_files_are_no_rollouts(tmp_path):
    for name in ("rollout-abc.zip", "rollout-.zip", "rollout-000001.zip.tmp", "rollout-000002.zip"):
        (tmp_path / name).touch()
    assert rollout_numbers(tmp_path) == [2]
    (tmp_path / "rollout-000003.zip").mkdir()
    with pytest.raises(InputError, match=r"rollout-000003.zip is damaged \(Is a directory\)"):
        Journal(tmp_path, [3], writes=False).read(3)
    with pytest.raises(RunError, match=r"rollout-000003.zip"):
        Journal(tmp_path, [3], writes=True).keep(before=3)


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
    journal.write(JournalEntry(feed.rollout, [0], {}), [])
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
