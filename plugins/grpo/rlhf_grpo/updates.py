"""What GRPO makes of a rollout: advantages of groups, and the minibatches that it is trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import Rollout, RolloutCollector
from rlhf_grpo.minibatches import sequence_kl, with_entropy_scale, with_kept

if TYPE_CHECKING:
    from rlhf_core import Advantage, TrainState
    from rlhf_grpo.config import GRPOConfig
    from rlhf_grpo.policies import PolicyReader

SAMPLED = ("sampling_logps",)
"""Per-token values that every micro-batch carries, also when the policies read it."""
PER_SEQUENCE = ("index", "reward")
"""Per-sequence values: a completion's number in its rollout, and its total reward."""


class GRPOSteps:
    """Gives rollouts group-normalised advantages, and cuts them into minibatches of whole groups.

    aggregation: of the policy loss.
    """

    def __init__(
        self,
        config: GRPOConfig,
        collector: RolloutCollector,
        advantage: Advantage,
        policies: PolicyReader,
        layout: Layout,
        aggregation: str,
    ) -> None:
        self.config, self.collector, self.prompts = config, collector, collector.prompts
        self.advantage, self.policies = advantage, policies
        self.layout, self.aggregation = layout, aggregation
        self.keeps_share = config.top_entropy_quantile < 1
        read = [name for name in policies.names if name != "entropies"]
        self.token_names = (*SAMPLED, "advantages", *read, *(("kept",) if self.keeps_share else ()))
        self.sequence_names = (*PER_SEQUENCE, *(("entropy_scale",) if config.entropy_coef else ()))

    def complete(self, rollout: Rollout, state: TrainState) -> Rollout:
        config = self.config
        in_reward = config.kl.place == "reward" and "ref_logps" in self.policies.names
        if self.policies.names:
            # A completion that is masked in the loss has its reward all the same, and its KL is part of that.
            mask = rollout.samples.mask if in_reward else self._mask(rollout)
            values = self.policies.read(rollout.trees(self.prompts, mask=mask), state.params)
            rollout = rollout.with_token_values(values, mask=mask)
        if in_reward and not self.policies.at_reference(state.params):
            penalty = sequence_kl(rollout.samples, rollout.token_values["ref_logps"], config.kl.name)
            rollout = replace(rollout, total=rollout.total - config.kl.beta * penalty)
        return rollout.with_advantages(self.advantage, self.collector.rewards, name=config.advantage.name)

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        groups, mask = self.config.total_batch_size // self.config.num_generations, self._mask(rollout)
        packed = [
            pack(
                rollout.trees(self.prompts, m * groups, (m + 1) * groups, mask=mask),
                self.layout,
                token_names=(*SAMPLED, "advantages", *self.policies.names),
                sequence_names=PER_SEQUENCE,
            )
            for m in range(self.config.steps_per_generation)
        ]
        if self.keeps_share:
            packed = [with_kept(batches, self.config.top_entropy_quantile) for batches in packed]
        if self.config.entropy_coef:
            length = self.config.sampling.max_completion_length
            packed = [with_entropy_scale(batches, self.aggregation, length) for batches in packed]
        return packed

    def _mask(self, rollout: Rollout) -> NDArray[np.bool_]:
        """Mark the tokens that are trained on, bool [N, C]."""
        mask = rollout.samples.mask
        if self.config.mask_truncated_completions:
            mask = mask & rollout.samples.finished[:, None]
        return mask
