"""GRPO's source of updates: rollouts, and the minibatches each is trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.ahead import Ahead
from rlhf_core.data import Prompts, drawn, schedule, updates
from rlhf_core.feeds import Encoded, Update, empty
from rlhf_core.mesh import abstract_rows, put_rows
from rlhf_core.rollouts import Reward, empty_warning, restore, snapshots
from rlhf_core.rows import Layout, Packed, pack
from rlhf_grpo.config import GRPOConfig
from rlhf_grpo.drawing import Sample, draw
from rlhf_grpo.minibatches import sequence_kl, with_advantages, with_entropy_scale, with_kept
from rlhf_grpo.reference import Reference
from rlhf_grpo.rollout import Rollout, advantage_inputs, advantages_of, group_trees
from rlhf_grpo.samples import write_samples

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_core.sampling import Rollouts

READ_TOKENS, READ_SEQUENCES = ("sampling_logps",), ("advantages", "index")
"""Names of what micro-batches carry when the policies read them."""


FIRST_ROLLOUTS = 3
"""In so many it is looked for completions that are mostly empty."""
FLAT_ROLLOUTS = 3
"""So many in a row without a difference within any group are worth a word."""


class RolloutFeed:
    """Update n trains on minibatch n mod steps_per_generation of rollout n div updates_per_rollout.

    A rollout is a function of the policy it starts from, the seed, its number and how many rounds of dynamic sampling
    came before; once drawn it is part of the state, so a checkpoint in the middle of one holds it with all that was
    computed from the policy of its start.
    """

    def __init__(
        self,
        stage: Stage,
        config: GRPOConfig,
        prompts: Prompts,
        tokenizer: Any,
        sampler: Any,
        rewards: Sequence[Reward],
        advantage: Callable[..., Any],
        read: Any,
        layout: Layout,
        reference: Reference | None,
        aggregation: str,
        preview: Callable[[int, TrainState], None] | None = None,
    ) -> None:
        """preview: called once, with 0 and the state that nothing was done to, when the first rollout is there."""
        self.stage, self.config, self.prompts, self.tokenizer = stage, config, prompts, tokenizer
        self.sampler, self.rewards, self.advantage = sampler, rewards, advantage
        self.read, self.layout, self.reference = read, layout, reference
        self.aggregation, self.preview = aggregation, preview
        self.mesh = stage.devices()
        self.data: Encoded = prompts
        rollouts = updates(len(prompts), config.prompts_per_rollout, config.num_train_epochs, None)
        planned = rollouts * config.updates_per_rollout
        self.total = planned if config.max_training_steps is None else config.max_training_steps
        self.updates_per_epoch = len(prompts) / config.prompts_per_rollout * config.updates_per_rollout
        self.rollout: Rollout | None = None
        self.packed: list[list[Packed]] = []  # micro-batches of each minibatch of the rollout
        self.metrics: dict[str, float] = {}
        self.reading = Ahead()
        self.flat, self.told_flat = 0, False  # rollouts in a row whose groups have nothing to compare
        self.told_empty = False
        self.extra_rounds = 0  # of dynamic sampling, in all rollouts so far: the prompts go on after them

    @property
    def off_policy(self) -> bool:
        """Whether the policy moves while a rollout is being used; only then are its first log-probabilities kept."""
        return self.config.updates_per_rollout > 1

    @property
    def token_names(self) -> tuple[str, ...]:
        names = ["sampling_logps"]
        names += ["old_logps"] if self.off_policy else []
        names += ["ref_logps"] if self.reference is not None else []
        names += ["kept"] if self.config.top_entropy_quantile < 1 else []
        return tuple(names)

    @property
    def sequence_names(self) -> tuple[str, ...]:
        return ("advantages", "index", *(("entropy_scale",) if self.config.entropy_coef else ()))

    def shapes(self) -> list[Packed]:
        return empty(self.layout, token_names=self.token_names, sequence_names=self.sequence_names)

    def compile(self, params: Any) -> None:
        """Start to compile what reads the policies, which are placed like `params`."""
        if self.reference is None and not self.off_policy and self.config.top_entropy_quantile == 1:
            return
        for batch in empty(self.layout, token_names=READ_TOKENS, sequence_names=READ_SEQUENCES):
            lowered = self.read.lower(params, abstract_rows(self.mesh, batch))
            self.reading.compile(batch.rows.tokens.shape, lowered)

    def needs_state(self, step: int) -> bool:
        return self.rollout is None or self.rollout.number != step // self.config.updates_per_rollout

    def update(self, step: int, state: TrainState) -> Update:
        config = self.config
        if self.needs_state(step):
            self.roll_out(step, state)
        assert self.rollout is not None
        batches = self.packed[step % config.steps_per_generation]
        groups = config.total_batch_size // config.num_generations
        first = step % config.steps_per_generation * groups
        rows = self.rollout.prompts[first : first + groups]
        tokens = sum(int(np.count_nonzero(batch.rows.visible_until)) for batch in batches)
        return Update(batches, tokens, lambda i: self.prompts.where(int(rows[i])), self.metrics)

    def roll_out(self, step: int, state: TrainState) -> None:
        """Draw, score and prepare rollout number step div updates_per_rollout."""
        config, number = self.config, step // self.config.updates_per_rollout
        drawn, self.metrics, rounds = draw(
            self.sample_with(state, number),
            self.prompts,
            self.tokenizer,
            self.rewards,
            self.batches_of(number),
            max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
            stop_ids=config.sampling.stop_token_ids,
        )
        self.tell_empty(number, drawn.inputs.completions)
        self.extra_rounds += rounds - 1
        self.tell_flat()
        total = drawn.total
        nothing = np.zeros(len(total), np.float32)
        self.rollout = Rollout(number, drawn.prompts, drawn.samples, drawn.each, nothing)
        packed = [self.read_policies(minibatch, state.params) for minibatch in self.pack_rollout()]
        if config.kl.place == "reward" and self.reference is not None:
            every = [batch for minibatch in packed for batch in minibatch]
            total = total - config.kl.beta * sequence_kl(every, len(total), config.kl.name)
        self.rollout.advantages = self.advantages(drawn.each, total, drawn.samples.lengths)
        self.packed = [self.finished(minibatch) for minibatch in packed]
        logged = (step + config.updates_per_rollout) // config.log_steps > step // config.log_steps
        if self.stage.is_main and (number == 0 or logged):
            path = self.stage.dir / "samples" / f"update-{step:06d}.jsonl"
            write_samples(path, drawn._replace(total=total), self.rewards, self.rollout.advantages)
        if number == 0 and self.preview is not None:
            self.preview(step, state)

    def tell_empty(self, number: int, completions: Sequence[Any]) -> None:
        """Warn once where most completions of one of the first rollouts are empty."""
        told = None if self.told_empty or number >= FIRST_ROLLOUTS else empty_warning(completions)
        if told is not None:
            self.told_empty = True
            if self.stage.is_main:
                warnings.warn(f"stage '{self.stage.name}': {told}", stacklevel=2)

    def tell_flat(self) -> None:
        """Say once that rollouts teach nothing."""
        self.flat = self.flat + 1 if self.metrics["frac_reward_zero_std"] == 1 else 0
        if self.flat == FLAT_ROLLOUTS and not self.told_flat and self.stage.is_main:
            self.told_flat = True
            warnings.warn(
                f"stage '{self.stage.name}': in {self.flat} rollouts one after another every group got one and the "
                f"same reward, {self.metrics['reward']:.4g} on average: nothing is learned. Read the completions in "
                f"{self.stage.dir / 'samples'}; the prompts may be too hard or too easy, or the reward too coarse",
                stacklevel=2,
            )

    def sample_with(self, state: TrainState, number: int) -> Sample:
        key, size = jax.random.fold_in(state.key, number), self.config.num_generations

        def sample(ids: Sequence[np.ndarray], round_number: int) -> Rollouts:
            # A completion's key goes by its number in the rollout, counted through the rounds.
            n = len(ids) * size
            return self.sampler(state.params, ids, key, np.arange(round_number * n, (round_number + 1) * n))

        return sample

    def batches_of(self, number: int) -> Callable[[int], NDArray[np.int64]]:
        """round → the prompts of that round of rollout `number`."""
        config = self.config
        order = schedule(
            len(self.prompts),
            config.prompts_per_rollout,
            seed=config.shuffle_seed_train if config.shuffle_seed_train is not None else self.stage.seed,
            shuffle=config.shuffle_train_dataset,
            start=number + self.extra_rounds,
        )
        return lambda _: np.asarray(next(order), np.int64)

    def advantages(self, each: np.ndarray, total: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        weights = [reward.weight for reward in self.rewards]
        inputs = advantage_inputs(each, total, weights, lengths, self.config.num_generations)
        return advantages_of(self.advantage, inputs, name=self.config.advantage.name)

    def pack_rollout(self) -> list[list[Packed]]:
        """The micro-batches of each minibatch; groups are never split between minibatches."""
        config = self.config
        assert self.rollout is not None
        groups = config.total_batch_size // config.num_generations
        return [
            pack(
                group_trees(
                    self.prompts,
                    self.rollout,
                    m * groups,
                    (m + 1) * groups,
                    mask_truncated=config.mask_truncated_completions,
                ),
                self.layout,
                token_names=READ_TOKENS,
                sequence_names=READ_SEQUENCES,
            )
            for m in range(config.steps_per_generation)
        ]

    def read_policies(self, batches: list[Packed], params: Any) -> list[Packed]:
        """Log-probabilities under the policy as it is now and under the reference, where they will be needed."""
        share = self.config.top_entropy_quantile
        entropies = []
        for i, batch in enumerate(batches):
            values, placed = dict(batch.token_values), put_rows(self.mesh, batch)
            self.reading.wait(batch.rows.tokens.shape)
            if self.reference is not None:
                values["ref_logps"] = _host(self.read(self.reference.params, placed)[0])
            if self.off_policy or share < 1:
                logps, entropy = (_host(x) for x in self.read(params, placed))
                entropies.append(entropy)
                if self.off_policy:
                    values["old_logps"] = logps
            batches[i] = batch._replace(token_values=values)
        return with_kept(batches, entropies, share) if share < 1 else batches

    def finished(self, batches: Sequence[Packed]) -> list[Packed]:
        """A minibatch with what follows from the rewards."""
        assert self.rollout is not None
        batches = [with_advantages(batch, self.rollout.advantages) for batch in batches]
        if not self.config.entropy_coef:
            return batches
        return with_entropy_scale(batches, self.aggregation, self.config.sampling.max_completion_length)

    def drawn(self, step: int, host: Mapping[str, Any]) -> NDArray[np.int64]:
        config = self.config
        rounds = -(-step // config.updates_per_rollout) + host["extra_rounds"]
        seed = config.shuffle_seed_train if config.shuffle_seed_train is not None else self.stage.seed
        count = rounds * config.prompts_per_rollout
        return drawn(len(self.prompts), count, seed=seed, shuffle=config.shuffle_train_dataset)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Little between rollouts; in the middle of one, the rollout and what its first policy said of it."""
        host: dict[str, Any] = {"extra_rounds": self.extra_rounds, "rewards": snapshots(self.rewards)}
        arrays: dict[str, np.ndarray] = {}
        if self.config.sync_ref_model and self.reference is not None:
            arrays |= self.reference.snapshot()
        if self.rollout is not None and not self.needs_state(step):
            host |= {"rollout": self.rollout.number, "metrics": self.metrics}
            arrays |= self.rollout.arrays()
            for m, minibatch in enumerate(self.packed):
                for b, batch in enumerate(minibatch):
                    for name in set(batch.token_values) - {"sampling_logps"}:
                        arrays[f"packed_{m}_{b}_{name}"] = batch.token_values[name]
        return host, arrays

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        if self.config.sync_ref_model and self.reference is not None:
            self.reference.restore(arrays)
        self.extra_rounds = host["extra_rounds"]
        restore(self.rewards, host["rewards"])
        if "rollout" not in host:
            return
        self.rollout = Rollout.from_arrays(host["rollout"], arrays)
        self.metrics = dict(host["metrics"])
        names = [name for name in self.token_names if name != "sampling_logps"]
        self.packed = []
        for m, minibatch in enumerate(self.pack_rollout()):
            for b, batch in enumerate(minibatch):
                saved = {name: np.asarray(arrays[f"packed_{m}_{b}_{name}"]) for name in names}
                minibatch[b] = batch._replace(token_values={**batch.token_values, **saved})
            self.packed.append(self.finished(minibatch))


def _host(x: jax.Array) -> np.ndarray:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(jax.device_get(x))
