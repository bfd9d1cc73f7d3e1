"""gpt-oss: sinks in attention, and experts with clamped activations and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.models.safetensors import Reader

if TYPE_CHECKING:
    from rlhf_core.models.hf_config import Fields

_EXPERTS = "model.layers.{layer}.mlp.experts"
WEIGHT_NAMES = {
    "layers.mlp.gate": "model.layers.{layer}.mlp.router",
    "layers.mlp.experts.gate_up_proj.kernel": f"{_EXPERTS}.gate_up_proj",
    "layers.mlp.experts.gate_up_proj.bias": f"{_EXPERTS}.gate_up_proj_bias",
    "layers.mlp.experts.down_proj.kernel": f"{_EXPERTS}.down_proj",
    "layers.mlp.experts.down_proj.bias": f"{_EXPERTS}.down_proj_bias",
}


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers that 4 bits stand for: a sign, two bits of exponent, one of mantissa."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors that hold one in MXFP4."""


class Quantized:
    """A tensor in MXFP4, [experts, in, out], as `safetensors.Reader` shows others.

    Its blocks, [experts, out, in / 32, 16], hold two numbers per byte, the lower half first; they are multiplied by
    2^(scale - 127), with scales [experts, out, in / 32].
    """

    def __init__(self, name: str, reader: Reader) -> None:
        self.name, self.reader, self.path = name, reader, reader.path
        experts, out, groups, half = reader.header[name + BLOCKS]["shape"]
        self.header = {name: {"shape": [experts, 2 * groups * half, out]}}

    def dtype(self, name: str) -> str:
        return "BF16"

    def view(self, name: str) -> np.ndarray:
        """Return the numbers, float32."""
        blocks, scales = (self.reader.raw(self.name + end) for end in (BLOCKS, SCALES))
        numbers = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1).reshape(*blocks.shape[:-1], -1)
        numbers = np.ldexp(numbers, (scales.astype(np.int32) - 127)[..., None])
        return numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def unquantized(readers: Mapping[str, Any]) -> dict[str, Any]:
    """Show each pair of tensors in MXFP4 as the one that they hold."""
    names = {name.removesuffix(BLOCKS) for name in readers if name.endswith(BLOCKS)}
    names = {name for name in names if name + SCALES in readers}
    plain = {name: reader for name, reader in readers.items() if name.removesuffix(BLOCKS) not in names}
    plain = {name: reader for name, reader in plain.items() if name.removesuffix(SCALES) not in names}
    return plain | {name: Quantized(name, readers[name + BLOCKS]) for name in names}


def details(read: Fields, layers: int) -> dict[str, Any]:
    """Read what differs from a plain decoder."""
    read.quantized = "mxfp4"
    return {
        "sinks": True,
        "router": "chosen",
        "swiglu": (read.number("swiglu_alpha", 1.702), read.positive("swiglu_limit") or 7.0),
    }
