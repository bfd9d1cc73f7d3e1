"""Options of an online DPO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from rlhf_core import REWARD, RolloutConfig
from rlhf_core.rollouts import WeightedReward
from rlhf_dpo.config import DPOConfig


class OnlineDPOConfig(DPOConfig, RolloutConfig):
    """Online DPO (Guo et al. 2024): the policy learns from pairs of its own completions, the best and the worst of each
    prompt by the rewards.
    """

    ALIASES: ClassVar = {
        "temperature": "sampling.temperature",
        "top_p": "sampling.top_p",
        "top_k": "sampling.top_k",
        "min_p": "sampling.min_p",
        "repetition_penalty": "sampling.repetition_penalty",
        "max_completion_length": "sampling.max_completion_length",
    }
    UNUSED_FIELDS: ClassVar[Mapping[str, str]] = {
        "max_sequence_length": "max_prompt_length limits prompts, max_completion_length completions",
        "prompt_repeated": "completions are sampled, and follow their prompts",
    }

    num_train_epochs: int = Field(default=1, ge=1, description="passes over the prompts")
    num_generations: int = Field(
        default=2, ge=2, description="completions per prompt, the best and the worst of which are a pair"
    )
    rewards: list[Annotated[WeightedReward, REWARD]] = Field(
        default=[], description="reward functions by name, `module:function` or `file.py:function`"
    )
    reward_weights: list[float] | None = Field(
        default=None,
        description="one weight per entry of `rewards`; none: each one's own `weight`, 1 by default",
    )
    num_iterations: int = Field(default=1, ge=1, description="times each pair is trained on")
    steps_per_generation: int = Field(default=1, ge=1, description="updates per pass over a rollout")
    num_preview_samples: int = Field(
        default=8,
        ge=0,
        description="prompts of eval_data, else of train_data, whose completions before the first update, at every "
        "evaluation and after the last are written to samples/, with every reward; 0: none",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_no_episodes(cls, given: Any) -> Any:
        for name in ("environment", "tools"):
            if name in given:
                raise ValueError(f"{name}: completions of online_dpo have one turn; train episodes with grpo")
        return given

    @model_validator(mode="after")
    def _can_differ(self) -> OnlineDPOConfig:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 gives identical completions, of which none is the best; use a temperature "
                "above 0"
            )
        return self

    @property
    def prompts_per_rollout(self) -> int:
        return self.total_batch_size * self.steps_per_generation // self.num_generations

    @property
    def updates_per_rollout(self) -> int:
        return self.steps_per_generation * self.num_iterations
