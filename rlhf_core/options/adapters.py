"""The options of low-rank adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_core.options.base import Options


class LoraOptions(Options):
    """Adapters beside linear layers, trained in place of the model's own parameters (Hu et al. 2021)."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets",
    }

    rank: int = Field(8, ge=1, description="of the product that is added to a kernel")
    alpha: float = Field(16.0, gt=0, description="the product is multiplied by alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of a layer's inputs that its adapter does not see, while training"
    )
    use_rslora: bool = Field(False, description="alpha / sqrt(rank) instead (Kalajdzievski 2023)")
    targets: str | list[str] = Field(
        "all-linear",
        description="all linear layers, or their names or regular expressions of their dotted paths",
    )
