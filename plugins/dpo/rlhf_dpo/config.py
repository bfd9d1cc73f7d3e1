"""Options of a DPO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from rlhf_core import Component, TrainerConfig
from rlhf_dpo.contract import DPO_LOSS

BETA = 0.1
BETAS: Mapping[str, float] = {"simpo": 2.0}
"""{name of a loss: its β where none is given}; that of the others is BETA."""


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
        default=BETA,
        gt=0,
        description="strength of the penalty for leaving the starting model; for ipo, the paper's τ; for simpo, "
        "2.0 by default, and cpo, what scales log-probabilities",
    )
    loss: Annotated[Component, DPO_LOSS] = Field(
        default=Component(name="sigmoid"), description="the loss and its options"
    )

    @model_validator(mode="after")
    def _default_beta(self) -> DPOConfig:
        """Take the loss's own β where none is given. It stays a default: `replace` with another loss changes it."""
        if "beta" not in self.model_fields_set:
            object.__setattr__(self, "beta", BETAS.get(self.loss.name, BETA))
        return self
