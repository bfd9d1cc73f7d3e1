"""GRPO's updates: advantages of groups, and the minibatches that each rollout is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit import Update, empty_batches
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import Rollout, RolloutCollector, RolloutUpdates
from rlhf_grpo.minibatches import sequence_kl, with_entropy_scale, with_kept, without_reference

if TYPE_CHECKING:
    from rlhf_core import Advantage, Stage, TrainState
    from rlhf_grpo.config import GRPOConfig
    from rlhf_grpo.policies import PolicyReader

SAMPLED = ("sampling_logps",)
"""Per-token values that every micro-batch carries, also when the policies read it."""
PER_SEQUENCE = ("index", "reward")
"""Per-sequence values: a completion's number in its rollout, and its total reward."""


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
        "sequence_names": (*PER_SEQUENCE, *(("entropy_scale",) if config.entropy_coef else ())),
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
            completions_to_print=config.num_completions_to_print if config.log_completions else 0,
        )
        self.config, self.advantage, self.policies = config, advantage, policies
        self.layout, self.aggregation = layout, aggregation
        self.keeps_share = config.top_entropy_quantile < 1

    def shapes(self) -> list[Packed]:
        return empty_batches(self.layout, **batch_values(self.config, self.policies.names))

    def needs_state(self, step: int) -> bool:
        reference = self.policies.reference
        return super().needs_state(step) or (reference is not None and not reference.apart)

    def update(self, step: int, state: TrainState) -> Update:
        update = super().update(step, state)
        if not self.policies.at_reference(state.params):
            return update
        return update._replace(batches=[without_reference(batch) for batch in update.batches])

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

    def snapshot(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        host, arrays = super().snapshot(step)
        return host, {**arrays, **self.policies.snapshot()}

    def restore(self, step: int, host: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.policies.restore(arrays)
        super().restore(step, host, arrays)
