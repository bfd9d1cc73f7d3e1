"""Attention and experts in Pallas kernels for GPUs and TPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_kernels.attention import Kernels as Kernels
    from rlhf_kernels.attention import attend_pallas as attend_pallas
    from rlhf_kernels.component import PallasAttention as PallasAttention
    from rlhf_kernels.decode import attend_visible as attend_visible

_HOMES = {
    "Kernels": "attention",
    "PallasAttention": "component",
    "attend_pallas": "attention",
    "attend_visible": "decode",
}
__all__ = ["Kernels", "PallasAttention", "attend_pallas", "attend_visible"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhf_kernels' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rlhf_kernels.{_HOMES[name]}"), name)
