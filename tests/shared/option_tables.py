"""A trainer's config as a plugin writes it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_core.config import Component, Options, TrainerConfig
from rlhf_core.contracts import ADVANTAGE, POLICY_LOSS, REWARD


class Sampling(Options):
    temperature: float = Field(1.0, gt=0, description="softmax temperature")
    top_k: int | None = None
    stops: tuple[int, ...] = ()


class KL(Options):
    name: Literal["k1", "k3"] = "k3"
    beta: float = 0.04


class WeightedReward(Component):
    weight: float = 1.0
    label: str | None = None


class PolicyConfig(TrainerConfig):
    """A trainer's config as a plugin writes it."""

    ALIASES: ClassVar[dict[str, Any]] = {
        "loss_type": "loss.name",
        "epsilon": ("loss.epsilon", 0.2),
        "delta": ("loss.delta", None),
        "beta": "kl.beta",
        "temperature": "sampling.temperature",
        "top_k": "sampling.top_k",
        "group_size": "num_generations",
    }

    loss: Annotated[Component, POLICY_LOSS] = Component(name="dapo")
    advantage: Annotated[Component, ADVANTAGE] | None = None
    rewards: list[Annotated[WeightedReward, REWARD]] = Field([])
    sampling: Sampling = Sampling()
    kl: KL = KL()
    num_generations: int = Field(8, ge=2)

    @model_validator(mode="after")
    def _fits(self) -> PolicyConfig:
        if self.total_batch_size % self.num_generations:
            raise ValueError(f"total_batch_size {self.total_batch_size} splits a group")
        return self
