"""Options of a distillation stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from rlhf_core import Component, RolloutConfig
from rlhf_distill.contract import DIVERGENCE


class DistillConfig(RolloutConfig):
    """On-policy distillation (Agarwal et al. 2024): a student learns its teacher's next-token distributions, on
    completions that it samples itself.
    """

    ALIASES: ClassVar[Mapping[str, Any]] = {
        "beta": ("divergence.beta", 0.5),
        "max_completion_length": "sampling.max_completion_length",
        "teacher": "teacher_model",
    }

    learning_rate: float = Field(default=1e-5, gt=0, description="at its peak")
    num_train_epochs: int = Field(
        default=1, ge=1, description="passes over the prompts, or over the rows where nothing is sampled"
    )
    teacher_model: str | None = Field(
        default=None,
        description="the larger model: a directory, a hub name, or an earlier stage's STAGE.OUTPUT",
    )
    teacher_revision: str | None = Field(
        default=None, description="branch, tag or commit of a teacher of the hub; none: its main branch"
    )
    on_policy_fraction: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of an update's examples that the student samples; the rest come from train_data",
    )
    steps_per_generation: int = Field(
        default=1, ge=1, description="updates made from the completions of one sampling round"
    )
    divergence: Annotated[Component, DIVERGENCE] = Field(
        default=Component(name="jsd"), description="between teacher and student, with its options"
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="temperature of both distributions in the divergence; sampling has its own",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="compare only the teacher's most likely ids, with all others as one outcome; none: "
        "the whole vocabulary",
    )
    num_preview_samples: int = Field(
        default=8,
        ge=0,
        description="prompts of eval_data, else of train_data, whose completions before the first update, at every "
        "evaluation and after the last are written to samples/; 0: none",
    )

    @property
    def sampled_per_update(self) -> int:
        """How many of an update's examples are completions of the student's own."""
        return round(self.on_policy_fraction * self.total_batch_size)

    @property
    def given_per_update(self) -> int:
        """How many of an update's examples are completions of train_data."""
        return self.total_batch_size - self.sampled_per_update

    @model_validator(mode="after")
    def _has_whole_examples(self) -> DistillConfig:
        share = self.on_policy_fraction * self.total_batch_size
        if 0 < self.on_policy_fraction < 1 and not 0 < self.sampled_per_update < self.total_batch_size:
            raise ValueError(
                f"on_policy_fraction={self.on_policy_fraction:g} of total_batch_size={self.total_batch_size} is "
                f"{share:g} examples, which rounds to {self.sampled_per_update}; raise total_batch_size, or give "
                f"{self.sampled_per_update // self.total_batch_size}"
            )
        return self
