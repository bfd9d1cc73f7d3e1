"""gpt-oss: sinks in attention, and experts with clamped activations and biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.models.hf_config import ConfigFields

_EXPERTS = "model.layers.{layer}.mlp.experts"
WEIGHT_NAMES = {
    "layers.mlp.gate": "model.layers.{layer}.mlp.router",
    "layers.mlp.experts.gate_up_proj.kernel": f"{_EXPERTS}.gate_up_proj",
    "layers.mlp.experts.gate_up_proj.bias": f"{_EXPERTS}.gate_up_proj_bias",
    "layers.mlp.experts.down_proj.kernel": f"{_EXPERTS}.down_proj",
    "layers.mlp.experts.down_proj.bias": f"{_EXPERTS}.down_proj_bias",
}


def details(read: ConfigFields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    read.quantized = (*read.quantized, "mxfp4")
    return {
        "sinks": True,
        "router": "chosen",
        "swiglu": (read.number("swiglu_alpha", 1.702), read.positive("swiglu_limit") or 7.0),
    }
