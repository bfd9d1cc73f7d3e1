"""The fields of a trainer that samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.config import Component, Options, TrainerConfig
from rlhf_core.contracts import SAMPLER
from rlhf_core.rollouts.collector import RolloutOptions
from rlhf_core.rollouts.sampling_plan import SamplingTestOptions
from rlhf_core.sampling import SamplingOptions


class RolloutConfig(TrainerConfig):
    """The fields of every trainer, and those of sampling. A trainer that samples extends it with its own."""

    class SamplingLimits(Options):
        """Bounds on logged metrics; beyond them the run stops with its state saved and a diagnosis."""

        surprisal_gap: float = Field(
            default=0.02,
            ge=0,
            description="nats per token by which the mean surprisal of completions may differ from the policy's "
            "entropy; evidence of 1e9 to 1 that it differs by more ends the run; 0: it is only logged",
        )

    max_prompt_length: int = Field(default=512, ge=1, description="tokens; longer prompts are dropped or cut")
    sampling: SamplingOptions = Field(default=SamplingOptions(), description="how completions are sampled")
    sampler: Annotated[Component, SAMPLER] = Field(
        default=Component(name="jax"), description="what samples completions"
    )
    rollouts_ahead: int = Field(
        default=0,
        ge=0,
        description="rollouts sampled before they are due: rollout r by the policy after the updates of rollout "
        "r - rollouts_ahead - 1",
    )
    journal: Literal["keep", "until_checkpoint"] = Field(
        default="keep",
        description="how long rollouts stay on disk: keep all, or those that a checkpoint may need",
    )
    limits: SamplingLimits = Field(
        default=SamplingLimits(), description="bounds at which a run stops, of what it samples"
    )

    @property
    def sampling_test(self) -> SamplingTestOptions:
        """How the sampler is tested; a trainer whose own passes read the moments says which."""
        return SamplingTestOptions(self.limits.surprisal_gap)

    def rollout_options(
        self, num_generations: int, prompts_per_rollout: int, **others: Any
    ) -> RolloutOptions:
        """Return how the trainer samples. others: further fields of `RolloutOptions`."""
        return RolloutOptions(
            self.max_prompt_length,
            num_generations,
            self.sampling,
            prompts_per_rollout,
            sampler=self.sampler,
            ahead=self.rollouts_ahead,
            journal=self.journal,
            **others,
        )
