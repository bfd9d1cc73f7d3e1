"""GRPO's updates: advantages of groups, and the minibatches that each rollout is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.fit import empty_batches
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import Rollout, RolloutCollector, RolloutUpdates, compute_advantages
from rlhf_grpo.minibatches import sequence_kl, with_entropy_scale, with_kept

if TYPE_CHECKING:
    from rlhf_core import Advantage, Stage, TrainState
    from rlhf_grpo.config import GRPOConfig
    from rlhf_grpo.policies import PolicyReader

SAMPLED = ("sampling_logps",)
"""Per-token values that every micro-batch carries, also when the policies read it."""
INDEX = ("index",)
"""Per-sequence values: a completion's number in its rollout."""


def batch_values(config: GRPOConfig, read: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name the values that micro-batches carry, as `empty_batches` takes them; read: from `values_read`."""
    names = [name for name in read if name != "entropies"]
    return {
        "token_names": (
            *SAMPLED,
            "advantages",
            *names,
            *(("kept",) if config.top_entropy_quantile < 1 else ()),
        ),
        "sequence_names": (*INDEX, *(("entropy_scale",) if config.entropy_coef else ())),
    }


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
        return empty_batches(self.layout, **batch_values(self.config, self.policies.names))

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
        rewards, name = self.collector.rewards, config.advantage.name
        return replace(rollout, advantages=compute_advantages(self.advantage, rollout, rewards, name=name))

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
