"""Options of a reward stage."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_core import PAIRWISE_LOSS, Component, TrainerConfig


class RewardConfig(TrainerConfig):
    """Train a scalar reward model on preference pairs."""

    ALIASES: ClassVar = {"loss_type": "loss.name"}

    LEARNING_FIELDS: ClassVar = ("center_rewards_coefficient", *TrainerConfig.LEARNING_FIELDS)

    loss: Annotated[Component, PAIRWISE_LOSS] = Field(
        default=Component(name="bradley_terry"), description="the pairwise loss and its options"
    )
    center_rewards_coefficient: float | None = Field(
        default=0.1,
        ge=0,
        description="weight of mean((chosen + rejected)^2), which keeps rewards near 0; 0 or none: off",
    )
    read_at: Literal["template", "eos"] | None = Field(
        default=None,
        description="where a conversation's score is read: 'template', at the last token that its chat "
        "template writes, as in other libraries, or 'eos', at the stop token after its last reply; none: "
        "as the model was "
        "trained, a fresh one 'template'",
    )
    num_preview_samples: int = Field(
        default=2,
        ge=0,
        description="held-out pairs that every evaluation shows and writes to samples/, with both scores; 0: none",
    )
