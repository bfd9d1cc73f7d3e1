"""Model families with layers of their own: Gemma 4, LFM2 and Qwen3.5; and flax modules as models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core import LAYER, MODEL, hookimpl

if TYPE_CHECKING:
    from rlhf_core import Registry
    from rlhf_families.flax_modules import nnx_family as nnx_family
    from rlhf_families.flax_modules import nnx_model as nnx_model
    from rlhf_families.flax_modules import nnx_module as nnx_module

__all__ = ["nnx_family", "nnx_model", "nnx_module"]


@hookimpl
def rlhf_register(registry: Registry) -> None:
    for name in ("gemma4", "lfm2", "qwen3_5"):
        registry.add(MODEL, name, f"rlhf_families.{name}:FAMILY")
    registry.add(LAYER, "gemma4", "rlhf_families.gemma4:Gemma4Layer")
    registry.add(LAYER, "short_convolution", "rlhf_families.lfm2:ConvolutionLayer")
    registry.add(LAYER, "gated_delta_rule", "rlhf_families.qwen3_5:DeltaLayer")


def __getattr__(name: str) -> object:
    if name in __all__:
        from rlhf_families import flax_modules

        return getattr(flax_modules, name)
    raise AttributeError(f"module 'rlhf_families' has no attribute '{name}'")
