"""Updates from rollouts; each rollout serves one or several updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf_core.config.warnings import batch_warnings
from rlhf_core.contracts import all_equal
from rlhf_core.data import PromptStream, batch_rows, count_updates
from rlhf_core.data.columns import is_blank
from rlhf_core.errors import counted, warn
from rlhf_core.fit.batches import EncodedRows, Update
from rlhf_core.metrics import Max, Metric, Min, Sum
from rlhf_core.packing.rows import Layout, Packed, empty_batches
from rlhf_core.reading import TreeReader
from rlhf_core.rewards.reward import restore, snapshots
from rlhf_core.rollouts.collector import RolloutCollector
from rlhf_core.rollouts.rollout import Rollout, Timing, completion_lines
from rlhf_core.training.context import Context
from rlhf_core.training.reference import Reference

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.tokenizer.encoding import Turns


FLAT_ROLLOUTS = 3
"""Rollouts in a row without a difference within any group before the warning."""
FIRST_ROLLOUTS = 3
"""Rollouts whose empty completions are counted: later a policy may have learned to say nothing."""


class PromptOrder:
    """Shuffled epochs over the prompts, or a stream of them, of which every round of a rollout takes the next
    `prompts_per_rollout`.

    epoch_rounds: rounds in the config's epochs. extra_rounds: rounds after the first, summed over all rollouts so far;
    later rollouts continue after them. rounds: of the newest rollout.
    """

    def __init__(
        self,
        config: TrainerConfig,
        count: int,
        *,
        prompts_per_rollout: int,
        updates_per_rollout: int,
        seed: int,
    ) -> None:
        """count: prompts of the dataset; 0: a stream, which has an order of its own. seed: used where the config has no
        shuffle_seed_train.
        """
        self.count, self.prompts_per_rollout = count, prompts_per_rollout
        self.updates_per_rollout = updates_per_rollout
        self.shuffle = config.shuffle_train_dataset
        self.seed = config.shuffle_seed_train if config.shuffle_seed_train is not None else seed
        self.epoch_rounds = count_updates(count, prompts_per_rollout, config.num_train_epochs, None)
        self.updates = config.max_training_steps
        self.extra_rounds, self.rounds = 0, 1

    def next_prompts(self, number: int) -> Callable[[], NDArray[np.int64]]:
        """Return a function that gives the prompts of rollout `number`, int64 [P], another round with each call."""
        if not self.count:
            rounds = itertools.count(number + self.extra_rounds)
            return lambda: np.arange(self.prompts_per_rollout) + next(rounds) * self.prompts_per_rollout
        order = batch_rows(
            self.count,
            self.prompts_per_rollout,
            seed=self.seed,
            shuffle=self.shuffle,
            start=number + self.extra_rounds,
        )
        return lambda: np.asarray(next(order), np.int64)

    def add_rounds(self, rounds: int) -> None:
        """Count the rounds of the newest rollout."""
        self.extra_rounds, self.rounds = self.extra_rounds + rounds - 1, rounds

    def ends_with(self, number: int) -> bool:
        """Return whether rollout `number` takes the last prompts of all epochs."""
        return number + 1 + self.extra_rounds >= self.epoch_rounds

    def epochs(self, step: int) -> float:
        """Return how many passes over the prompts the first `step` updates make, of the newest rollout or later.

        Of a stream, whose length is not known, it is the share of the run.
        """
        if not self.count:
            return step / (self.updates or 1)
        number, within = divmod(step - 1, self.updates_per_rollout)
        before = number + self.extra_rounds - (self.rounds - 1)  # rounds of the rollouts before this one
        rounds = before + self.rounds * (within + 1) / self.updates_per_rollout
        return rounds * self.prompts_per_rollout / self.count


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


class RolloutUpdates:
    """The `UpdateSource` of a trainer that samples: update n belongs to rollout n div updates_per_rollout.

    The number of minibatches divides updates_per_rollout, so that the updates of a rollout go through its minibatches
    once or several times. The rollout is part of every checkpoint that lies within it, with all that `steps.prepare`
    computed from the policy of its start: a run that is resumed continues with it.
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
        completions_to_print: int = 0,
    ) -> None:
        """layout: of micro-batches. reference: micro-batches that carry `ref_logps` have NaN in place of them while the
        policy is the reference. reading: what reads each rollout. completions_to_print: of a logged rollout.
        """
        config, options = context.config, collector.options
        self.stage, self.collector, self.prompts = context.stage, collector, collector.prompts
        self.layout, self.steps, self.reference, self.reading = layout, steps, reference, reading
        self.stream = collector.prompts if isinstance(collector.prompts, PromptStream) else None
        count, updates = 0 if self.stream else len(collector.prompts), options.updates_per_rollout
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
        self.fixed_total, self.log_steps = config.max_training_steps is not None, config.log_steps
        total = config.max_training_steps
        self.total = self.order.epoch_rounds * updates if total is None else total
        self.rollout: Rollout | None = None
        self.packed: Sequence[Sequence[Packed]] = []
        self.timing = Timing()  # of a rollout that no update has reported yet
        self.warnings = RolloutWarnings(self.stage)
        self.completions_to_print = completions_to_print

    def shapes(self) -> list[Packed]:
        names = {"token_names": self.steps.token_names, "sequence_names": self.steps.sequence_names}
        return empty_batches(self.layout, **names)

    def needs_state(self, step: int) -> bool:
        together = self.reference is not None and not self.reference.apart
        return self._needs_rollout(step) or together

    def _needs_rollout(self, step: int) -> bool:
        return self.rollout is None or self.rollout.number != step // self.updates_per_rollout

    def update(self, step: int, state: TrainState) -> Update:
        if self._needs_rollout(step):
            self._begin_rollout(step, state)
        assert self.rollout is not None
        minibatch, groups = step % len(self.packed), len(self.rollout.prompts) // len(self.packed)
        batches = self.packed[minibatch]
        within = self.rollout.tree_groups(minibatch * groups, (minibatch + 1) * groups)
        rows = self.rollout.prompts[np.asarray(within, np.int64)]
        tokens = sum(int(np.count_nonzero(batch.rows.visible_until)) for batch in batches)
        metrics = _update_metrics(self.rollout.metrics, first=step % self.updates_per_rollout == 0)
        timing, self.timing = self.timing.metrics(), Timing()
        if not self.collector.rewards:
            del timing["time/reward"]
        if self.reference is not None and self.reference.equals(self.collector.policy(state.params)):
            batches = [without_reference(batch) for batch in batches]
        return Update(batches, tokens, lambda i: self.prompts.where(int(rows[i])), metrics, timing)

    def _begin_rollout(self, step: int, state: TrainState) -> None:
        """Collect and prepare the rollout that update `step` begins."""
        number = step // self.updates_per_rollout
        if self.rollout is None:  # the sampler compiles
            count = self.order.prompts_per_rollout * self.collector.options.num_generations
            self.stage.say(f"sampling the first rollout ({counted(count, 'completions')})")
        if self.stream is not None:
            self.stream.begin((number + self.order.extra_rounds) * self.order.prompts_per_rollout)
        rollout = self.collector.collect(state, number, self.order.next_prompts(number))
        self.timing = rollout.timing
        self.order.add_rounds(rollout.rounds)
        self._end_with_epochs(number)
        self.warnings.check(number, rollout)
        self.rollout = self.steps.prepare(rollout, state)
        self.packed = self.steps.minibatches(self.rollout)
        logged = (step + self.updates_per_rollout) // self.log_steps > step // self.log_steps
        if self.stage.is_main and (number == 0 or logged):
            self.rollout.write(
                self.stage.dir / "samples" / f"update-{step:06d}.jsonl", self.collector.rewards
            )
            for lines in completion_lines(self.rollout, self.collector.rewards, self.completions_to_print):
                self.stage.say(f"update {step + 1:,}, {lines}")

    def _end_with_epochs(self, number: int) -> None:
        """Make rollout `number` the last one where it takes the last prompts of all epochs."""
        if not self.fixed_total and self.order.ends_with(number):
            self.total = min(self.total, (number + 1) * self.updates_per_rollout)

    def _warn_of_other_answers(self, step: int) -> None:
        """Warn that episodes begin again, where the environment may answer them in another way."""
        source = self.collector.episodes
        if step and source is not None and not source.calls.deterministic and self.stage.is_main:
            warn(
                f"stage '{self.stage.name}'.environment: '{source.calls.name}' is not deterministic: episodes "
                "that ran after the checkpoint restart and may differ"
            )

    def epochs(self, step: int) -> float:
        return self.order.epochs(step)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        host = {"extra_rounds": self.order.extra_rounds, "rewards": snapshots(self.collector.rewards)}
        if self.stream is not None:
            host["prompts"] = self.stream.snapshot()
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
        self.order.extra_rounds, self.order.rounds = host["extra_rounds"], host.get("rounds", 1)
        if step:
            self._end_with_epochs((step - 1) // self.updates_per_rollout)
        restore(self.collector.rewards, host["rewards"])
        if self.stream is not None:
            self.stream.restore(host["prompts"])
        if "rollout" not in host:
            self._warn_of_other_answers(step)
            return
        self.rollout = Rollout.from_arrays(
            arrays, number=host["rollout"], rounds=host["rounds"], metrics=dict(host["metrics"])
        )
        self.packed = self.steps.minibatches(self.rollout)


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


class RolloutWarnings:
    """Checks every rollout of a stage; the first process warns, once per kind of warning."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.flat = 0  # rollouts in a row with nothing to compare
        self.given: set[str] = set()

    def check(self, number: int, rollout: Rollout) -> None:
        """Warn about empty completions in the first rollouts, and about groups without a difference, or one
        that float32 loses.

        number: of the rollout, from 0.
        """
        assert rollout.inputs is not None
        completions, metrics = rollout.inputs.completions, rollout.metrics
        if rollout.conversations is not None:  # episodes that failed have a warning of their own
            failures = rollout.conversations.failures
            completions = [said for said, why in zip(completions, failures, strict=True) if why is None]
        if number < FIRST_ROLLOUTS and (line := empty_warning(completions)) is not None:
            self._warn("empty", line)
        if (pair := lost_difference(rollout)) is not None:
            self._warn(
                "float32",
                f"rewards of a group, such as {pair[0]!r} and {pair[1]!r}, differ by less than float32 holds: the "
                "built-in advantages compare them in float64, but losses, and advantages that read `rewards`, "
                "see them as equal. Subtract a constant in the reward",
            )
        share = metrics.get("frac_reward_zero_std", 0.0)  # absent where a group is one completion
        self.flat = self.flat + 1 if share == 1 or math.isnan(share) else 0
        if self.flat != FLAT_ROLLOUTS:
            return
        result = (
            "no group had two completions that a reward scored"
            if math.isnan(share)
            else f"every group got the same reward, {metrics['reward']:.4g} on average"
        )
        self._warn(
            "flat",
            f"in {self.flat} consecutive rollouts, {result}: nothing is learned. Read the completions in "
            f"{self.stage.dir / 'samples'}; the prompts may be too hard or too easy, or the reward too coarse",
        )

    def _warn(self, kind: str, line: str) -> None:
        if self.stage.is_main and kind not in self.given:
            warn(f"stage '{self.stage.name}': {line}")
        self.given.add(kind)


def lost_difference(rollout: Rollout) -> tuple[float, float] | None:
    """Find a group whose rewards differ, but by less than float32 holds at their size: (lowest, highest)."""
    total = rollout.total.reshape(len(rollout.prompts), -1)
    for values in total[~all_equal(total)]:
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if high - low < np.spacing(np.float32(max(abs(low), abs(high)))):
            return low, high
    return None


def empty_warning(completions: Sequence[Turns]) -> str | None:
    """Return a warning if more than half of the completions, texts or message lists, are empty, else None."""
    empty = sum(map(is_blank, completions))
    if empty * 2 <= len(completions):
        return None
    return (
        f"{empty:,} of {len(completions):,} completions are empty: the model stops immediately, as chat models do "
        'after plain text; write prompts as messages, [{"role": "user", "content": …}], so that its chat template is '
        "used"
    )
