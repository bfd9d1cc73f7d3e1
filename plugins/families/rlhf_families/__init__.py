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
    from rlhf_core.models import decoder_family
    from rlhf_families import gemma4, lfm2, qwen3_5

    for name, module in {"gemma4": gemma4, "lfm2": lfm2, "qwen3_5": qwen3_5}.items():
        registry.add(MODEL, name, decoder_family(module.ARCHITECTURES))
    registry.add(LAYER, "gemma4", gemma4.Gemma4Layer)
    registry.add(LAYER, "short_convolution", lfm2.ConvolutionLayer)
    registry.add(LAYER, "gated_delta_rule", qwen3_5.DeltaLayer)


def __getattr__(name: str) -> object:
    if name in __all__:
        from rlhf_families import flax_modules

        return getattr(flax_modules, name)
    raise AttributeError(f"module 'rlhf_families' has no attribute '{name}'")
