"""GRPO's source of updates: rollouts, and the minibatches each is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import Prompts
from rlhf_core.fit.batches import Encoded, Update, empty
from rlhf_core.mesh import abstract_rows, put_rows
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import Reward, restore, snapshots
from rlhf_core.runtime.background import Ahead
from rlhf_grpo.config import GRPOConfig
from rlhf_grpo.minibatches import (
    laid,
    on_host,
    places,
    sequence_kl,
    with_advantages,
    with_entropy_scale,
    with_kept,
)
from rlhf_grpo.prompt_order import PromptOrder
from rlhf_grpo.reference import Reference
from rlhf_grpo.rollout import (
    Clock,
    Rollout,
    Sample,
    advantage_inputs,
    advantages_of,
    draw,
    group_trees,
    merging,
    write_samples,
)
from rlhf_grpo.watching import RolloutWarnings

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_core.sampling import Rollouts

READ_TOKENS, READ_SEQUENCES = ("sampling_logps",), ("advantages", "index")
"""Names of what micro-batches carry when the policies read them."""


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
        self.order = PromptOrder(config, len(prompts), seed=stage.seed)
        self.total = config.max_training_steps or self.order.draws * config.updates_per_rollout
        self.rollout: Rollout | None = None
        self.packed: list[list[Packed]] = []  # micro-batches of each minibatch of the rollout
        self.metrics: dict[str, float] = {}
        self.reading = Ahead()
        self.watched = RolloutWarnings(stage)
        self.updates_per_epoch = self.order.pace(config.updates_per_rollout)
        self.clock = Clock()  # of the rollout that was just drawn

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
        self.updates_per_epoch = self.order.pace(step + 1)
        metrics = merging(self.metrics, once=step % config.updates_per_rollout == 0)
        clock, self.clock = self.clock, Clock()
        return Update(batches, tokens, lambda i: self.prompts.where(int(rows[i])), metrics, clock.metrics())

    def roll_out(self, step: int, state: TrainState) -> None:
        """Draw, score and prepare rollout number step div updates_per_rollout."""
        config, number = self.config, step // self.config.updates_per_rollout
        if self.rollout is None:  # the first of this process: the sampler compiles
            count = config.prompts_per_rollout * config.num_generations
            self.stage.say(f"drawing the first rollout, {count:,} completions")
        drawn, self.metrics, rounds = draw(
            self.sample_with(state, number),
            self.prompts,
            self.tokenizer,
            self.rewards,
            self.order.batches(number),
            max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
            stop_ids=config.sampling.stop_token_ids,
        )
        self.clock = drawn.clock
        self.order.took(rounds)
        self.end_with_epochs(number)
        self.watched.look(number, drawn.inputs.completions, self.metrics)
        total = drawn.total
        nothing = np.zeros(len(total), np.float32)
        self.rollout = Rollout(number, drawn.prompts, drawn.samples, drawn.each, nothing)
        in_reward = config.kl.place == "reward" and self.reference is not None
        # A completion that is masked in the loss has its reward all the same, and its KL is part of that.
        packed = self.pack_rollout(masked=not in_reward)
        self.read_policies(packed, state.params)
        if in_reward:
            taxed = sequence_kl(drawn.samples, self.rollout.read["ref_logps"], config.kl.name)
            total = total - config.kl.beta * taxed
            packed = self.pack_rollout() if config.mask_truncated_completions else packed
        self.rollout.advantages = self.advantages(drawn.each, total, drawn.samples.lengths)
        self.packed = [self.finished(minibatch) for minibatch in packed]
        logged = (step + config.updates_per_rollout) // config.log_steps > step // config.log_steps
        if self.stage.is_main and (number == 0 or logged):
            path = self.stage.dir / "samples" / f"update-{step:06d}.jsonl"
            write_samples(path, drawn._replace(total=total), self.rewards, self.rollout.advantages)
        if number == 0 and self.preview is not None:
            self.preview(step, state)

    def end_with_epochs(self, number: int) -> None:
        """Make rollout `number` the last one where the prompts of all epochs have been drawn."""
        if self.config.max_training_steps is None and self.order.is_drawn_after(number):
            self.total = min(self.total, (number + 1) * self.config.updates_per_rollout)

    def sample_with(self, state: TrainState, number: int) -> Sample:
        key, size = jax.random.fold_in(state.key, number), self.config.num_generations

        def sample(ids: Sequence[np.ndarray], round_number: int) -> Rollouts:
            # A completion's key goes by its number in the rollout, counted through the rounds.
            n = len(ids) * size
            return self.sampler(state.params, ids, key, np.arange(round_number * n, (round_number + 1) * n))

        return sample

    def advantages(self, each: np.ndarray, total: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        weights = [reward.weight for reward in self.rewards]
        inputs = advantage_inputs(each, total, weights, lengths, self.config.num_generations)
        return advantages_of(self.advantage, inputs, name=self.config.advantage.name)

    def pack_rollout(self, *, masked: bool = True) -> list[list[Packed]]:
        """The micro-batches of each minibatch; groups are never split between minibatches.

        masked: whether `mask_truncated_completions` is heeded; without, every token of a completion counts.
        """
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
                    mask_truncated=masked and config.mask_truncated_completions,
                ),
                self.layout,
                token_names=READ_TOKENS,
                sequence_names=READ_SEQUENCES,
            )
            for m in range(config.steps_per_generation)
        ]

    def read_policies(self, packed: Sequence[Sequence[Packed]], params: Any) -> None:
        """Keep of every token what the policy as it is now and the reference say of it, where it will be needed."""
        assert self.rollout is not None
        names = ["ref_logps"] if self.reference is not None else []
        names += ["old_logps"] if self.off_policy else []
        names += ["entropies"] if self.config.top_entropy_quantile < 1 else []
        read = {name: np.zeros(self.rollout.samples.tokens.shape, np.float32) for name in names}
        sizes = self.prompt_sizes()
        for batch in (batch for minibatch in packed for batch in minibatch if names):
            placed, at = put_rows(self.mesh, batch), places(batch, sizes)
            self.reading.wait(batch.rows.tokens.shape)
            values: dict[str, np.ndarray] = {}
            if self.reference is not None:
                values["ref_logps"] = on_host(self.read(self.reference.params, placed)[0])
            if "old_logps" in read or "entropies" in read:
                values["old_logps"], values["entropies"] = (on_host(x) for x in self.read(params, placed))
            for name, kept in read.items():
                kept[at.completion, at.token] = values[name][at.row, at.column]
        self.rollout.read = read

    def prompt_sizes(self) -> NDArray[np.int64]:
        """Tokens of each completion's prompt, int64 [N]."""
        assert self.rollout is not None
        sizes = [len(self.prompts.ids[i]) for i in self.rollout.prompts]
        return np.repeat(np.array(sizes, np.int64), self.config.num_generations)

    def finished(self, batches: Sequence[Packed]) -> list[Packed]:
        """A minibatch with all that its update needs: advantages, and what the policies said."""
        assert self.rollout is not None
        config, read, sizes, entropies = self.config, self.rollout.read, self.prompt_sizes(), []
        done = []
        for batch in batches:
            at = places(batch, sizes)
            values = dict(batch.token_values)
            values |= {
                name: laid(at, read[name], batch) for name in ("ref_logps", "old_logps") if name in read
            }
            batch = batch._replace(token_values=values)
            entropies += [laid(at, read["entropies"], batch)] if "entropies" in read else []
            done.append(with_advantages(batch, self.rollout.advantages))
        if config.top_entropy_quantile < 1:
            done = with_kept(done, entropies, config.top_entropy_quantile)
        if not config.entropy_coef:
            return done
        return with_entropy_scale(done, self.aggregation, config.sampling.max_completion_length)

    def drawn(self, step: int, host: Mapping[str, Any]) -> NDArray[np.int64]:
        return self.order.drawn(step, host["extra_rounds"])

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Little between rollouts; in the middle of one, the rollout and what its first policy said of it."""
        host: dict[str, Any] = {"extra_rounds": self.order.extra_rounds, "rewards": snapshots(self.rewards)}
        arrays: dict[str, np.ndarray] = {}
        if self.config.sync_ref_model and self.reference is not None:
            arrays |= self.reference.snapshot()
        if self.rollout is not None and not self.needs_state(step):
            host |= {"rollout": self.rollout.number, "metrics": self.metrics, "rounds": self.order.rounds}
            arrays |= self.rollout.arrays()
        return host, arrays

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        if self.config.sync_ref_model and self.reference is not None:
            self.reference.restore(arrays)
        self.order.extra_rounds, self.order.rounds = host["extra_rounds"], host.get("rounds", 1)
        if step:
            self.updates_per_epoch = self.order.pace(step)
            self.end_with_epochs((step - 1) // self.config.updates_per_rollout)
        restore(self.rewards, host["rewards"])
        if "rollout" not in host:
            return
        self.rollout = Rollout.from_arrays(host["rollout"], arrays)
        self.metrics = dict(host["metrics"])
        self.packed = [self.finished(minibatch) for minibatch in self.pack_rollout()]
