"""GRPO's updates: advantages of groups, and the minibatches that each rollout is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core import AdvantageInputs
from rlhf_core.data import Prompts
from rlhf_core.errors import InputError, RunError, raised
from rlhf_core.fit.batches import empty_batches
from rlhf_core.packing.rows import Layout, Packed, Tree, pack
from rlhf_core.rollouts import Rollout, RolloutCollector, RolloutUpdates, completion
from rlhf_grpo.minibatches import (
    locate,
    scatter,
    sequence_kl,
    with_entropy_scale,
    with_kept,
)

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_core.contracts import Advantage
    from rlhf_core.rollouts import Reward
    from rlhf_grpo.config import GRPOConfig
    from rlhf_grpo.policies import PolicyReader

HERE = str(Path(__file__).parent)
SAMPLED = ("sampling_logps",)
"""Per-token values that every micro-batch carries, also when the policies read it."""
INDEX = ("index",)
"""Per-sequence values: a completion's number in its rollout."""


class GRPOUpdates(RolloutUpdates):
    """Rollouts with group-normalised advantages, cut into minibatches of whole groups."""

    def __init__(
        self,
        stage: Stage,
        config: GRPOConfig,
        collector: RolloutCollector,
        advantage: Advantage,
        policies: PolicyReader,
        layout: Layout,
        aggregation: str,
    ) -> None:
        super().__init__(
            stage,
            config,
            collector,
            prompts_per_rollout=config.prompts_per_rollout,
            updates_per_rollout=config.updates_per_rollout,
        )
        self.config, self.advantage, self.policies = config, advantage, policies
        self.layout, self.aggregation = layout, aggregation
        policies.compile(empty_batches(layout, token_names=SAMPLED, sequence_names=INDEX))

    def shapes(self) -> list[Packed]:
        laid = [name for name in self.policies.names if name != "entropies"]
        laid += ["kept"] if self.config.top_entropy_quantile < 1 else []
        return empty_batches(
            self.layout,
            token_names=(*SAMPLED, "advantages", *laid),
            sequence_names=(*INDEX, *(("entropy_scale",) if self.config.entropy_coef else ())),
        )

    def complete(self, rollout: Rollout, state: TrainState) -> Rollout:
        config = self.config
        in_reward = config.kl.place == "reward" and "ref_logps" in self.policies.names
        # A completion that is masked in the loss has its reward all the same, and its KL is part of that.
        packed = self.pack(rollout, masked=not in_reward) if self.policies.names else []
        values = self.policies.read(packed, rollout, self.prompt_sizes(rollout), state.params)
        total = rollout.total
        if in_reward:
            total = total - config.kl.beta * sequence_kl(rollout.samples, values["ref_logps"], config.kl.name)
        rollout = replace(rollout, total=total, token_values=values)
        inputs = advantage_inputs(rollout, self.collector.rewards)
        width = rollout.samples.tokens.shape[1]
        return replace(
            rollout,
            advantages=compute_advantages(self.advantage, inputs, width, name=config.advantage.name),
        )

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        """Lay the advantages and what the policies said into the packed groups."""
        sizes, values = self.prompt_sizes(rollout), dict(rollout.token_values)
        advantages = rollout.advantages
        values["advantages"] = (
            advantages
            if advantages.ndim > 1
            else np.broadcast_to(advantages[:, None], rollout.samples.tokens.shape)
        )
        return [self._finish(minibatch, values, sizes) for minibatch in self.pack(rollout)]

    def pack(self, rollout: Rollout, *, masked: bool = True) -> list[list[Packed]]:
        """Pack the groups of each minibatch; a group is never split between minibatches.

        masked: whether `mask_truncated_completions` is heeded; if not, every token of a completion counts.
        """
        config = self.config
        groups = config.total_batch_size // config.num_generations
        hidden = masked and config.mask_truncated_completions
        return [
            pack(
                group_trees(self.prompts, rollout, m * groups, (m + 1) * groups, mask_truncated=hidden),
                self.layout,
                token_names=SAMPLED,
                sequence_names=INDEX,
            )
            for m in range(config.steps_per_generation)
        ]

    def prompt_sizes(self, rollout: Rollout) -> NDArray[np.int64]:
        """Return the number of prompt tokens of each completion, int64 [N]."""
        sizes = [len(self.prompts.ids[i]) for i in rollout.prompts]
        return np.repeat(np.array(sizes, np.int64), self.config.num_generations)

    def _finish(
        self, batches: Sequence[Packed], values: Mapping[str, NDArray[np.float32]], sizes: NDArray[np.int64]
    ) -> list[Packed]:
        done, entropies = [], []
        for batch in batches:
            at = locate(batch, sizes)
            laid = {name: scatter(at, each, batch) for name, each in values.items()}
            entropies += [laid.pop("entropies")] if "entropies" in laid else []
            done.append(batch._replace(token_values={**batch.token_values, **laid}))
        if entropies:
            done = with_kept(done, entropies, self.config.top_entropy_quantile)
        if not self.config.entropy_coef:
            return done
        return with_entropy_scale(done, self.aggregation, self.config.sampling.max_completion_length)

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        host, arrays = super().snapshot(step)
        return host, {**arrays, **self.policies.snapshot()}

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.policies.restore(arrays)
        super().restore(step, host, arrays)


def advantage_inputs(rollout: Rollout, rewards: Sequence[Reward]) -> AdvantageInputs:
    """Group a rollout's rewards by prompt."""
    group, inputs = rollout.group, rollout.inputs
    return AdvantageInputs(
        rewards=rollout.total.reshape(-1, group),
        rewards_by_function=rollout.rewards.reshape(-1, group, len(rewards)),
        weights=np.array([reward.weight for reward in rewards], np.float64),
        lengths=np.asarray(rollout.samples.lengths).reshape(-1, group),
        labels=tuple(reward.label for reward in rewards),
        columns={} if inputs is None else inputs.columns,
    )


def compute_advantages(
    advantage: Callable[[AdvantageInputs], Any], inputs: AdvantageInputs, width: int, *, name: str
) -> NDArray[np.float32]:
    """Compute advantages by the component called `name`: float32 [N], or [N, width] where it returns one per token.

    Raises RunError where it raises, or returns anything but finite numbers [prompts, samples] or [prompts, samples,
    time], with a time that reaches the longest completion.
    """
    what, shape = f"advantage '{name}'", inputs.rewards.shape
    try:
        out = np.asarray(advantage(inputs), np.float32)
    except (InputError, RunError):
        raise
    except Exception as error:
        raise RunError(f"{what} {raised(error, HERE)}") from error
    longest = int(np.max(inputs.lengths))
    if out.shape != shape and not (out.ndim == 3 and out.shape[:2] == shape and out.shape[2] >= longest):
        raise RunError(
            f"{what} returned an array of shape {list(out.shape)}; wanted is one number per completion, {list(shape)} "
            f"(prompts, and samples of each), or one per token, {[*shape, longest]} or longer"
        )
    if not np.isfinite(out).all():
        prompt, sample, *_ = np.argwhere(~np.isfinite(out))[0]
        raise RunError(
            f"{what} returned {out[prompt, sample]} for sample {sample} of prompt {prompt}, whose rewards are "
            f"{np.asarray(inputs.rewards)[prompt].tolist()}; advantages are finite, 0 where there is nothing to learn"
        )
    if out.ndim == 2:
        return out.reshape(-1)
    laid = np.zeros((out.shape[0] * out.shape[1], width), np.float32)
    kept = out.reshape(len(laid), -1)[:, :width]
    laid[:, : kept.shape[1]] = kept
    return laid


def group_trees(
    prompts: Prompts, rollout: Rollout, start: int, stop: int, *, mask_truncated: bool
) -> list[Tree]:
    """Make trees of groups `start` to `stop` of a rollout: the prompt once, its completions as branches.

    Trained are the tokens that the policy wrote, as `mask` has it. A branch carries the sampler's log-probabilities and
    `index`, its number in the rollout.
    """
    samples, group = rollout.samples, rollout.group
    trees = []
    for g in range(start, stop):
        members = range(g * group, (g + 1) * group)
        off = [mask_truncated and not samples.finished[i] for i in members]
        lengths = [int(samples.lengths[i]) for i in members]
        trees.append(
            Tree(
                prefix=np.asarray(prompts.ids[rollout.prompts[g]], np.int32),
                branches=tuple(completion(samples, i) for i in members),
                weights=tuple(
                    np.where(samples.mask[i, :length], 0.0 if masked else 1.0, 0.0).astype(np.float32)
                    for i, length, masked in zip(members, lengths, off, strict=True)
                ),
                token_values={
                    "sampling_logps": tuple(
                        np.asarray(samples.logps[i, :length], np.float32)
                        for i, length in zip(members, lengths, strict=True)
                    )
                },
                sequence_values={"index": np.arange(members.start, members.stop, dtype=np.float32)},
            )
        )
    return trees
