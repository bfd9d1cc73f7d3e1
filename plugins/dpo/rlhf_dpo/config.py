"""Options of a DPO stage."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_core import Component, TrainerConfig
from rlhf_dpo.contract import DPO_LOSS


class DPOConfig(TrainerConfig):
    """Direct preference optimization (Rafailov et al. 2023): a policy from preference pairs, without a reward model."""

    ALIASES: ClassVar = {
        "loss_type": "loss.name",
        "label_smoothing": ("loss.label_smoothing", 0.0),
    }

    LEARNING_FIELDS: ClassVar = ("beta", *TrainerConfig.LEARNING_FIELDS)

    learning_rate: float = Field(default=1e-6, gt=0, description="at its peak")
    num_train_epochs: int | float = Field(default=1, gt=0, description="passes over the pairs")
    beta: float = Field(
        default=0.1,
        gt=0,
        description="strength of the penalty for leaving the starting model; for ipo, the paper's τ",
    )
    loss: Annotated[Component, DPO_LOSS] = Field(
        default=Component(name="sigmoid"), description="the loss and its options"
    )
