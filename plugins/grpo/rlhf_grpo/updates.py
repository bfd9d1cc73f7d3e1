"""GRPO's updates: advantages of groups, and the minibatches that each rollout is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core import AdvantageInputs
from rlhf_core.errors import InputError, RunError, error_line
from rlhf_core.fit.batches import empty_batches
from rlhf_core.packing.rows import Layout, Packed, pack
from rlhf_core.rollouts import Rollout, RolloutCollector, RolloutUpdates
from rlhf_grpo.minibatches import sequence_kl, with_entropy_scale, with_kept

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
        self.keeps_share = config.top_entropy_quantile < 1
        policies.compile(empty_batches(layout, token_names=SAMPLED, sequence_names=INDEX))

    def shapes(self) -> list[Packed]:
        names = [name for name in self.policies.names if name != "entropies"]
        return empty_batches(
            self.layout,
            token_names=(*SAMPLED, "advantages", *names, *(("kept",) if self.keeps_share else ())),
            sequence_names=(*INDEX, *(("entropy_scale",) if self.config.entropy_coef else ())),
        )

    def complete(self, rollout: Rollout, state: TrainState) -> Rollout:
        config = self.config
        in_reward = config.kl.place == "reward" and "ref_logps" in self.policies.names
        if self.policies.names:
            # A completion that is masked in the loss has its reward all the same, and its KL is part of that.
            packed = self._pack(rollout, SAMPLED, masked=not in_reward)
            sizes = np.repeat([len(self.prompts.ids[i]) for i in rollout.prompts], rollout.group)
            rollout = replace(rollout, token_values=self.policies.read(packed, rollout, sizes, state.params))
        if in_reward:
            penalty = sequence_kl(rollout.samples, rollout.token_values["ref_logps"], config.kl.name)
            rollout = replace(rollout, total=rollout.total - config.kl.beta * penalty)
        inputs = advantage_inputs(rollout, self.collector.rewards)
        width = rollout.samples.tokens.shape[1]
        advantages = compute_advantages(self.advantage, inputs, width, name=config.advantage.name)
        return replace(rollout, advantages=advantages)

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        packed = self._pack(rollout, (*SAMPLED, "advantages", *self.policies.names))
        if self.keeps_share:
            packed = [with_kept(batches, self.config.top_entropy_quantile) for batches in packed]
        if self.config.entropy_coef:
            length = self.config.sampling.max_completion_length
            packed = [with_entropy_scale(batches, self.aggregation, length) for batches in packed]
        return packed

    def _pack(self, rollout: Rollout, names: Sequence[str], *, masked: bool = True) -> list[list[Packed]]:
        """Pack the groups of each minibatch, with the token values of these names; no group is split between them.

        masked: whether `mask_truncated_completions` is heeded; if not, every token of a completion counts.
        """
        config, mask = self.config, rollout.samples.mask
        if masked and config.mask_truncated_completions:
            mask = mask & rollout.samples.finished[:, None]
        groups = config.total_batch_size // config.num_generations
        return [
            pack(
                rollout.trees(self.prompts, m * groups, (m + 1) * groups, mask=mask),
                self.layout,
                token_names=names,
                sequence_names=INDEX,
            )
            for m in range(config.steps_per_generation)
        ]

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
        raise RunError(f"{what} {error_line(error, HERE)}") from error
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
