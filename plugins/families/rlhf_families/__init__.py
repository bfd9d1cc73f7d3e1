"""Model families with layers of their own: Gemma 4, LFM2 and Qwen3.5; and flax modules as models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_families.flax_modules import nnx_family as nnx_family
    from rlhf_families.flax_modules import nnx_model as nnx_model
    from rlhf_families.flax_modules import nnx_module as nnx_module

__all__ = ["nnx_family", "nnx_model", "nnx_module"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from rlhf_families import flax_modules

        return getattr(flax_modules, name)
    raise AttributeError(f"module 'rlhf_families' has no attribute '{name}'")
