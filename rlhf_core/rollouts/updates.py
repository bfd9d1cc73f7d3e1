"""Updates from rollouts; each rollout serves one or several updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.config.warnings import batch_warnings
from rlhf_core.data.prompts import PromptStream
from rlhf_core.errors import InputError, RunError, Stopped, counted
from rlhf_core.fit.batches import EncodedRows, Update
from rlhf_core.metrics import Max, Mean, Metric, Min, Sum
from rlhf_core.packing.rows import Layout, Packed, empty_batches
from rlhf_core.reading import TreeReader
from rlhf_core.rewards.reward import restore, snapshots
from rlhf_core.rollouts.collector import RolloutCollector
from rlhf_core.rollouts.flights import Flight, Order
from rlhf_core.rollouts.journal import Journal, JournalEntry
from rlhf_core.rollouts.prompt_order import PromptOrder
from rlhf_core.rollouts.rollout import Rollout, Timing, completion_lines
from rlhf_core.rollouts.rollout_warnings import RolloutWarnings
from rlhf_core.rollouts.sampling_test import SamplingTest
from rlhf_core.runtime.rollout_files import rollout_numbers
from rlhf_core.training.context import Context
from rlhf_core.training.reference import Reference

if TYPE_CHECKING:
    from rlhf_core.state import TrainState


DIFFERENCE = "sampling/logp_difference_mean"
"""The metric of an objective that compares the sampler's log-probabilities with the trainer's, nats."""


class RolloutSteps(Protocol):
    """What a trainer makes of its rollouts.

    token_names, sequence_names: values that micro-batches carry.
    """

    @property
    def token_names(self) -> Sequence[str]: ...

    @property
    def sequence_names(self) -> Sequence[str]: ...

    def prepare(self, rollout: Rollout, state: TrainState) -> Rollout:
        """Return the rollout with its advantages and token values, computed with the policy that sampled it."""
        ...

    def minibatches(self, rollout: Rollout) -> Sequence[Sequence[Packed]]:
        """Return the micro-batches of each minibatch, a function of the prepared rollout alone.

        Minibatch i of n has the i-th n-th of the prompts; `Packed.example` counts its trees.
        """
        ...


class Reading(NamedTuple):
    """A pass over every rollout, for a compiler: what reads it, and with which parameters."""

    reader: TreeReader
    params: Callable[[Any], Any]
    """Makes what the reader takes from a state's parameters."""
    held: Sequence[str]
    """The names of these parameters among a stage's residents."""


def completions(batch: Packed) -> NDArray[np.int64]:
    """Return the completion of the rollout that each sequence is, [rows, sequences]; -1 where unused."""
    if "index" not in batch.sequence_values:
        raise InputError(
            "the values of completions are asked for, and micro-batches do not say which these are: add "
            '"index" to the sequence_names of the rollout\'s steps'
        )
    numbers: NDArray[np.int64] = np.where(batch.example < 0, -1, batch.sequence_values["index"]).astype(
        np.int64
    )
    return numbers


class RolloutUpdates:
    """The `UpdateSource` of a trainer that samples: update n belongs to rollout n div updates_per_rollout.

    The number of minibatches divides updates_per_rollout, so that the updates of a rollout go through its minibatches
    once or several times. The rollout is part of every checkpoint that lies within it, with all that `steps.prepare`
    computed from the policy of its start: a run that is resumed continues with it.

    With `rollouts_ahead` = k, rollout r is sampled before the updates of rollout r - k, so by the policy after those of
    rollout r - k - 1; the first k + 1 by the policy that training starts from. Rewards score rollouts in their order.
    """

    def __init__(
        self,
        context: Context,
        collector: RolloutCollector,
        layout: Layout,
        steps: RolloutSteps,
        *,
        reference: Reference | None = None,
        reading: Reading | None = None,
        test: SamplingTest | None = None,
        completions_to_print: int = 0,
    ) -> None:
        """layout: of micro-batches. reference: micro-batches that carry `ref_logps` have NaN in place of them while the
        policy is the reference. reading: what reads each rollout. test: of the sampler, for each rollout; checkpoints
        hold its evidence. completions_to_print: of a logged rollout.
        """
        config, options = context.config, collector.options
        self.options = options
        self.stage, self.collector, self.prompts = context.stage, collector, collector.prompts
        self.layout, self.steps, self.reference, self.test = layout, steps, reference, test
        self.readings = [] if reading is None else [reading]
        """The passes over every rollout."""
        if test is not None and test.options.read_by == "test":
            self.readings.append(Reading(test.reader, collector.policy, ("parameters", "frozen parameters")))
        self.stream = collector.prompts if isinstance(collector.prompts, PromptStream) else None
        count = 0 if self.stream else len(collector.prompts)
        updates = options.updates_per_rollout
        if count:
            context.warn(
                *batch_warnings(
                    config,
                    count,
                    prompts_per_rollout=options.prompts_per_rollout,
                    num_generations=options.num_generations,
                )
            )
        self.data: EncodedRows = collector.prompts
        self.updates_per_rollout = updates
        self.order = PromptOrder(
            config,
            count,
            prompts_per_rollout=options.prompts_per_rollout,
            updates_per_rollout=updates,
            seed=context.seed,
        )
        self.fixed_total = config.max_training_steps is not None
        self.log_steps = config.log_steps
        total = config.max_training_steps
        self.total = self.order.epoch_rounds * updates if total is None else total
        self.ready: dict[int, JournalEntry] = {}
        """Rollouts that are scored, by number, and not trained on yet."""
        self.sampled_rollouts = 0
        """Rollouts sampled so far, those that are ready included."""
        self._rewards: Mapping[str, Any] = {}
        """The states of the rewards after the newest whole rollout."""
        self._settled: Mapping[str, Any] = {}
        """Those after the rollout that is trained on."""
        self.flights: dict[int, Flight] = {}
        """Rollouts that are being sampled, by number."""
        self._unfinished: list[Order] = []
        """Rollouts that were being sampled when the run was killed."""
        self._entered = -1
        """The update whose groups were entered in the ledger last."""
        self._difference = Mean(0.0, 0.0)
        """Between the sampler's and the trainer's log-probabilities of the rollout that is trained on."""
        self.journal: Journal | None = None
        self.ledger = Ledger()
        self.config = config
        self.rollout: Rollout | None = None
        self.packed: Sequence[Sequence[Packed]] = []
        self.timing = Timing()  # of a rollout that no update has reported yet
        self.warnings = RolloutWarnings(self.stage)
        self.completions_to_print = completions_to_print

    def shapes(self) -> list[Packed]:
        names = {"token_names": self.steps.token_names, "sequence_names": self.steps.sequence_names}
        return empty_batches(self.layout, **names, routes=self.collector.routes)

    def needs_state(self, step: int) -> bool:
        together = self.reference is not None and not self.reference.apart
        return self._needs_rollout(step) or together

    def _needs_rollout(self, step: int) -> bool:
        return self.rollout is None or self.rollout.number != step // self.updates_per_rollout

    def update(self, step: int, state: TrainState) -> Update:
        if self.stage.replay is not None and step == self.stage.replay.until:
            raise Stopped(f"stage '{self.stage.name}': replayed {step} updates")
        number, within = divmod(step, self.updates_per_rollout)
        if self._needs_rollout(step):
            self._begin_rollout(step, state)
        assert self.rollout is not None
        if within == 0:
            self._sample(number, state)  # the last rollouts may need prompts that this one has given back
            self._end_with_epochs(number)
        minibatches = len(self.packed)
        minibatch = within % minibatches
        groups = len(self.rollout.prompts) // minibatches
        batches = self.packed[minibatch]
        chosen = self.rollout.tree_groups(minibatch * groups, (minibatch + 1) * groups)
        # Programs may be compiled for an update before it is made, which enters it once.
        if within < minibatches and step != self._entered:
            self.ledger.use(groups)
        self._entered = step
        self._count_groups()
        rows = self.rollout.prompts[np.asarray(chosen, np.int64)]
        tokens = sum(int(np.count_nonzero(batch.rows.visible_until)) for batch in batches)
        metrics = _update_metrics(self.rollout.metrics, first=within == 0)
        if self.options.ahead:
            metrics["rollout/lag"] = float(step - int(self.rollout.samples.version[0]))
        timing = self.timing.metrics()
        self.timing = Timing()
        if not self.collector.rewards:
            del timing["time/reward"]
        if self.reference is not None and self.reference.equals(self.collector.policy(state.params)):
            batches = [without_reference(batch) for batch in batches]
        return Update(
            batches, tokens, lambda i: self.prompts.where(int(rows[i])), metrics, timing, numbers=completions
        )

    def measured(self, step: int, metrics: Mapping[str, Metric]) -> str | None:
        """Take the metrics of update `step`; return why the run must stop, or None.

        Where the policy that sampled a rollout is the one that it trains, the trainer's log-probabilities of its tokens
        are the sampler's, but for rounding. A sampler elsewhere, which may have used other weights, judges how far they
        are apart.
        """
        verdict = getattr(self.collector.sampler, "verdict", None)
        if verdict is None or self.options.ahead or self.stage.replay is not None:
            return None
        if DIFFERENCE not in metrics:
            return None
        number, within = divmod(step, self.updates_per_rollout)
        measured: Any = jax.device_get(metrics[DIFFERENCE])
        self._difference = measured if within == 0 else self._difference.merge(measured)
        if within < self.updates_per_rollout - 1 or not self._difference.count:
            return None
        reason: str | None = verdict(number * self.updates_per_rollout, float(self._difference.result()))
        return reason

    def _begin_rollout(self, step: int, state: TrainState) -> None:
        """Sample what is due before update `step`, and prepare the rollout that it begins."""
        number = step // self.updates_per_rollout
        if self.rollout is None and self.sampled_rollouts < number:  # the updates before it are passed over
            self.sampled_rollouts = self.order.following = number
            self.ledger.passed_over = number * self.order.prompts_per_rollout
        if self.rollout is None and not self.ready and self.stage.replay is None:  # the sampler compiles
            count = self.order.prompts_per_rollout * self.options.num_generations
            self.stage.say(f"sampling the first rollout ({counted(count, 'completions')})")
        self._sample(number, state)
        if number in self.flights:
            self._land(number)
        rollout, taken, states = self.ready[number]
        prepared = self._prepare(rollout, state)
        packed = self.steps.minibatches(prepared)
        is_logged = (step + self.updates_per_rollout) // self.log_steps > step // self.log_steps
        if self.stage.is_main and (number == 0 or is_logged):
            self._show_samples(step, prepared)
        # What may fail has happened: a state that is saved holds the rollout before, or this one.
        del self.ready[number]
        self._settle(states)
        self.order.settle(taken, rollout.rounds)
        before = min(step % self.updates_per_rollout, len(packed)) * len(rollout.prompts) // len(packed)
        self.ledger.begin(rollout, passed_over=before)
        self.rollout = prepared
        self.packed = packed
        self.timing = rollout.timing
        if self.stream is not None:
            # Prompts before the first round that is in use, or may be reserved again, are never read again.
            rounds = [*taken[: rollout.rounds], *self.order.returned]
            for entry in self.ready.values():
                rounds += entry.taken
            for flight in self.flights.values():
                rounds += flight.order.taken
            self.stream.begin(min(rounds) * self.order.prompts_per_rollout)
        self.warnings.check(number, rollout)

    def _show_samples(self, step: int, rollout: Rollout) -> None:
        """Write the completions of a rollout that begins with update `step`, and print some."""
        rewards = self.collector.rewards
        rollout.write(self.stage.dir / "samples" / f"update-{step:06d}.jsonl", rewards)
        for lines in completion_lines(rollout, rewards, self.completions_to_print):
            self.stage.say(f"update {step + 1:,}, {lines}")

    def _prepare(self, rollout: Rollout, state: TrainState) -> Rollout:
        """Have the trainer prepare a rollout, and test the sampler on it."""
        if self.test is None:
            return self.steps.prepare(rollout, state)
        self.test.begin(rollout)
        prepared = self.steps.prepare(rollout, state)
        return self.test.complete(prepared, self.collector.policy(state.params))

    def _sample(self, number: int, state: TrainState) -> None:
        """Sample the rollouts that are due before the updates of rollout `number`, as far as there are prompts."""
        if self.journal is None:
            self.journal = self._open_journal()
        while self._unfinished:  # when the run was killed
            publisher: Any = self.collector.sampler
            self._launch(self._unfinished[0], publisher.published(self._unfinished[0].version), state)
            del self._unfinished[0]
        while self.sampled_rollouts <= number or (
            self.sampled_rollouts <= number + self.options.ahead and self._goes_on
        ):
            entry = self.journal.read(self.sampled_rollouts)
            if entry is None and self.stage.replay is not None:
                if self.sampled_rollouts > number:
                    break
                raise Stopped(f"stage '{self.stage.name}': the journal ends before rollout {number}")
            if entry is not None:
                self.journal.require_rounds(entry, self.order.reserve(len(entry.taken)))
                restore(self.collector.rewards, entry.rewards)
                self._put(entry)
            else:
                self._collect(state)
            self.sampled_rollouts += 1

    def _put(self, entry: JournalEntry) -> None:
        """Take a whole rollout."""
        self._rewards = entry.rewards
        self.ready[entry.rollout.number] = entry

    def _settle(self, states: Mapping[str, Any]) -> None:
        """Have evaluations score with these states of the rewards."""
        self._settled = states
        for reward in self.collector.rewards:
            reward.settled = states.get(reward.label)

    def _count_groups(self) -> None:
        """Compare the groups whose prompts are reserved with those that there are. Raises RunError for a difference."""
        size, order = self.order.prompts_per_rollout, self.order
        flying = sum(len(flight.order.taken) for flight in self.flights.values())
        waiting = sum(len(entry.taken) for entry in self.ready.values())
        self.ledger.compare(
            (order.following - len(order.returned)) * size, sampling=flying * size, ready=waiting * size
        )

    @property
    def _goes_on(self) -> bool:
        """Whether rollouts follow those that were sampled."""
        if self.fixed_total:
            return self.sampled_rollouts * self.updates_per_rollout < self.total
        return not self.order.exhausted

    def _collect(self, state: TrainState) -> None:
        """Sample the next rollout, or have it sampled in a thread by a sampler that publishes policies."""
        before = self.order.following, self.order.returned
        taken = self.order.reserve(self.options.max_rounds)
        order = Order(self.sampled_rollouts, taken, int(state.step))
        try:
            policy = self.collector.hand_over(self.collector.policy(state.params), order.version)
            if self._flies:
                self._launch(order, policy, state)
                return
            rounds = iter(taken)
            rollout = self.collector.collect(
                policy,
                jax.random.fold_in(state.key, order.number),
                order.number,
                lambda: self.order.prompts(next(rounds)),
                version=order.version,
            )
            entry = JournalEntry(rollout, taken, snapshots(self.collector.rewards))
            assert self.journal is not None
            self.journal.write(entry, self.collector.rewards)
        except BaseException:  # the state is saved, and continues with these prompts
            self.order.following, self.order.returned = before
            raise
        self._put(entry)

    @property
    def _flies(self) -> bool:
        """Whether rollouts are sampled in threads."""
        return hasattr(self.collector.sampler, "publish") and jax.process_count() == 1

    def _launch(self, order: Order, policy: Any, state: TrainState) -> None:
        assert self.journal is not None
        self.flights[order.number] = Flight(
            self.collector,
            self.journal,
            order,
            policy,
            jax.random.fold_in(state.key, order.number),
            [self.order.prompts(number) for number in order.taken],
            self.flights.get(order.number - 1),
        )

    def _land(self, number: int) -> None:
        """Wait for a rollout that is sampled in a thread, and let the sampler forget policies that none waits for."""
        flight = self.flights[number]
        self._put(flight.land())
        del self.flights[number]
        retire = getattr(self.collector.sampler, "retire", None)
        if retire is not None:
            retire(
                min((other.order.version for other in self.flights.values()), default=flight.order.version)
            )

    def _open_journal(self) -> Journal:
        stage = self.stage
        if stage.replay is not None:
            given = stage.replay.journal
            return Journal(given, rollout_numbers(given), writes=False)
        fresh = not self.sampled_rollouts and not self.config.checkpoints.resume
        return Journal.open(stage, keep=self.sampled_rollouts, fresh=fresh)

    def _end_with_epochs(self, number: int) -> None:
        """Make rollout `number` the last one where it has the last prompts of all epochs."""
        if (
            not self.fixed_total
            and not (self.ready or self.flights or self._unfinished)
            and self.order.exhausted
        ):
            self.total = min(self.total, (number + 1) * self.updates_per_rollout)

    def epochs(self, step: int) -> float:
        return self.order.epochs(step)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        host = {
            "sampled": self.sampled_rollouts,
            "following": self.order.following,
            "returned": self.order.returned,
            "extra_rounds": self.order.extra_rounds,
            "flying": [*(flight.order for flight in self.flights.values()), *self._unfinished],
            "ledger": asdict(self.ledger),
            "rewards": self._rewards,
            "settled": self._settled,
        }
        if self.test is not None:
            host["sampling_test"] = self.test.snapshot()
        if self.stream is not None:
            host["prompts"] = self.stream.snapshot()
        if self.journal is not None and self.options.journal == "until_checkpoint":
            checkpoints = [int(path.name) for path in (self.stage.dir / "checkpoints").glob("[0-9]*")]
            self.journal.keep(min(checkpoints, default=0) // self.updates_per_rollout)
        arrays = {}
        if self.reference is not None and self.reference.moves:
            arrays = self.reference.snapshot()
        if self.rollout is None or self._needs_rollout(step):
            return host, arrays
        host |= {"rollout": self.rollout.number, "metrics": self.rollout.metrics, "rounds": self.order.rounds}
        return host, {**self.rollout.arrays(), **arrays}

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        if self.reference is not None and self.reference.moves:
            self.reference.restore(arrays)
        order = self.order
        self.sampled_rollouts, self.ledger = host["sampled"], Ledger(**host["ledger"])
        order.following, order.returned = host["following"], host["returned"]
        order.extra_rounds, order.rounds = host["extra_rounds"], host.get("rounds", 1)
        if self.test is not None:
            self.test.restore(host.get("sampling_test", {}))
        self.journal = self._open_journal()
        restore(self.collector.rewards, host["rewards"])
        self._rewards = host["rewards"]
        self._settle(host["settled"])
        flying = {order[0]: Order(*order) for order in host["flying"]}
        for number in range(-(-step // self.updates_per_rollout), self.sampled_rollouts):
            entry = self.journal.read(number)
            if entry is not None and number in flying:  # it was finished after the checkpoint
                self._put(entry)
                restore(self.collector.rewards, entry.rewards)
            elif number in flying:
                self._unfinished.append(flying[number])
            else:
                self.ready[number] = self.journal.require(number)
        if step:
            self._end_with_epochs((step - 1) // self.updates_per_rollout)
        if self.stream is not None:
            self.stream.restore(host["prompts"])
        if "rollout" not in host:
            return
        self.rollout = Rollout.from_arrays(
            arrays, number=host["rollout"], rounds=host["rounds"], metrics=dict(host["metrics"])
        )
        self.packed = self.steps.minibatches(self.rollout)


@dataclass
class Ledger:
    """Where the groups of a stage are whose prompts were reserved.

    training: in the rollout that is trained on, and not in an update yet. used: that an update had. equal, surplus:
    dropped by dynamic sampling, since their rewards are equal, or since the rollout was full. passed_over: of updates
    that `checkpoints.start` skipped.
    """

    training: int = 0
    used: int = 0
    equal: int = 0
    surplus: int = 0
    passed_over: int = 0

    def begin(self, rollout: Rollout, passed_over: int) -> None:
        """Enter the rollout that is trained on next, `passed_over` of whose groups no update will have.

        Raises RunError where updates did not have all groups of the one before.
        """
        if self.training:
            raise RunError(
                f"{self.training:,} groups of the rollout before rollout {rollout.number} were in no update"
            )
        self.training = len(rollout.prompts) - passed_over
        self.passed_over += passed_over
        self.equal += int(rollout.metrics.get("dynamic_sampling/dropped", 0))
        self.surplus += int(rollout.metrics.get("dynamic_sampling/surplus", 0))

    def use(self, groups: int) -> None:
        """Enter groups that an update trains on for the first time."""
        self.training = self.training - groups
        self.used = self.used + groups

    def compare(self, planned: int, *, sampling: int, ready: int) -> None:
        """Compare with what the rollouts hold. Raises RunError if groups are missing, or are there twice.

        planned: groups whose prompts are reserved. sampling, ready: of rollouts that are being sampled, and that wait.
        """
        known = {"being sampled": sampling, "ready": ready, "in training": self.training, "used": self.used}
        known |= {"dropped": self.equal + self.surplus, "passed over": self.passed_over}
        if planned != sum(known.values()):
            found = ", ".join(f"{count:,} {where}" for where, count in known.items() if count)
            raise RunError(
                f"{planned:,} groups were planned, and these are known: {found}: report this as a bug"
            )


def without_reference(batch: Packed) -> Packed:
    """Replace `ref_logps` by NaN: the policy is the reference, and the program that trains it has the same numbers."""
    values = batch.token_values
    if "ref_logps" not in values:
        return batch
    return batch._replace(token_values={**values, "ref_logps": np.full_like(values["ref_logps"], np.nan)})


def _update_metrics(metrics: Mapping[str, float], *, first: bool) -> dict[str, float | Metric]:
    """Turn a rollout's metrics into those of an update that uses it: counts add up, extremes stay extremes.

    first: whether it is the first update of the rollout, the only one that counts what is counted.
    """
    out: dict[str, float | Metric] = dict(metrics)
    for name, value in metrics.items():
        if name.endswith("/failed"):
            out[name] = Sum(value if first else 0.0)
        elif name.startswith(("completions/min_", "completions/max_")):
            del out[name]
            if np.isfinite(value):
                out[name] = Min(value) if "/min_" in name else Max(value)
    return out
