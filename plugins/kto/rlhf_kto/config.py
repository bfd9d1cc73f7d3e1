"""Options of a KTO stage."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_core import Component, TrainerConfig
from rlhf_kto.contract import KTO_LOSS


class KTOConfig(TrainerConfig):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024): a policy from completions that are good or bad."""

    ALIASES: ClassVar = {"loss_type": "loss.name"}
    LEARNING_FIELDS: ClassVar = (
        *("beta", "desirable_weight", "undesirable_weight"),
        *TrainerConfig.LEARNING_FIELDS,
    )

    learning_rate: float = Field(default=1e-6, gt=0, description="at its peak")
    num_train_epochs: int | float = Field(default=1, gt=0, description="passes over the completions")
    beta: float = Field(
        default=0.1, gt=0, description="strength of the penalty for leaving the starting model"
    )
    desirable_weight: float = Field(
        default=1.0, gt=0, description="weight of the losses of desirable completions"
    )
    undesirable_weight: float = Field(default=1.0, gt=0, description="the same of undesirable ones")
    loss: Annotated[Component, KTO_LOSS] = Field(
        default=Component(name="kto"), description="the loss and its options"
    )
