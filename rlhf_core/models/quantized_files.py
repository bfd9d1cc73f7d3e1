"""Tensors that files hold in few bits: MXFP4, FP8, and the 4 and 8 bits of bitsandbytes.

Each is shown as `safetensors.TensorFile` shows others, as the numbers that its format defines, float32.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

import rlhf_core.models.safetensors as safetensors
from rlhf_core.errors import InputError
from rlhf_core.models.quantized import BLOCK, NF4, OUTER, Quantization, scale_values
from rlhf_core.models.safetensors import NAMES, TensorFile

METHODS = ("bitsandbytes", "fp8")
"""Each `quant_method` that any family may have; gpt_oss has mxfp4, too."""
DTYPES: Mapping[str, Any] = {
    **safetensors.DTYPES,
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers that 4 bits stand for in MXFP4: a sign, two bits of exponent, one of mantissa."""
FP8_BLOCK = 128
"""Rows and columns of an FP8 matrix that share a scale."""


def array(readers: Mapping[str, TensorFile], name: str) -> np.ndarray:
    """Return a tensor as it is stored."""
    reader, entry = readers[name], readers[name].header[name]
    if entry["dtype"] not in DTYPES:
        raise InputError(
            f"{reader.path}: '{name}' has dtype {entry['dtype']}, which its format does not have"
        )
    stored: np.ndarray = reader.raw(name).reshape(-1).view(DTYPES[entry["dtype"]])
    return stored.reshape(entry["shape"])


class Stored:
    """A tensor in few bits. readers: of the files' tensors."""

    stored_dtype = "BF16"

    def __init__(self, name: str, readers: Mapping[str, TensorFile]) -> None:
        self.name, self.readers, self.path = name, readers, readers[self.parts(name)[0]].path
        self.header = {name: {"shape": self.shape()}}

    @staticmethod
    def parts(name: str) -> list[str]:
        """Name the tensors that together hold it."""
        raise NotImplementedError

    def shape(self) -> list[int]:
        return list(self.readers[self.name].header[self.name]["shape"])

    def array(self, ending: str = "") -> np.ndarray:
        return array(self.readers, self.name + ending)

    def dtype(self, name: str) -> str:
        """Return the dtype that the model was quantized from, as in a file's header."""
        return self.stored_dtype

    def view(self, name: str) -> np.ndarray:
        """Return the numbers, float32."""
        raise NotImplementedError

    def arrays(self, kind: Quantization) -> dict[str, np.ndarray] | None:
        """Return the arrays of `quantized.layout` for `kind`, where the files have them; else None."""
        return None


class MXFP4(Stored):
    """[experts, in, out]: blocks, [experts, out, in / 32, 16], hold two numbers per byte, the lower half first; they
    are multiplied by 2^(scale - 127), with scales [experts, out, in / 32].
    """

    @staticmethod
    def parts(name: str) -> list[str]:
        return [f"{name}_blocks", f"{name}_scales"]

    def shape(self) -> list[int]:
        first = self.parts(self.name)[0]
        experts, out, groups, half = self.readers[first].header[first]["shape"]
        return [experts, 2 * groups * half, out]

    def view(self, name: str) -> np.ndarray:
        blocks, scales = self.array("_blocks"), self.array("_scales")
        numbers = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], -1).reshape(*blocks.shape[:-1], -1)
        numbers = np.ldexp(numbers, (scales.astype(np.int32) - 127)[..., None])
        return numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


class FP8(Stored):
    """Numbers in 8 bits times a scale of the tensor, of each row, or of blocks of 128 × 128."""

    def __init__(self, name: str, readers: Mapping[str, TensorFile]) -> None:
        self.scale = next(name + end for end in ("_scale_inv", "_scale") if name + end in readers)
        super().__init__(name, readers)

    @staticmethod
    def parts(name: str) -> list[str]:
        stem = name.removesuffix("weight")
        # Activations stay as they are.
        unused = [f"{stem}activation_scale", f"{stem}input_scale", f"{name}_activation_scale"]
        return [name, f"{name}_scale_inv", f"{name}_scale", *unused]

    def view(self, name: str) -> np.ndarray:
        numbers = self.array().astype(np.float32)
        scales = array(self.readers, self.scale).astype(np.float32)
        rows, columns = numbers.shape[-2:]
        blocks = tuple(-(-size // FP8_BLOCK) for size in (rows, columns))
        if scales.size == 1:
            return numbers * scales.reshape(())
        if scales.shape == (rows, 1):
            return numbers * scales
        if scales.shape[-2:] != blocks:
            raise InputError(
                f"{self.path}: '{self.scale}' has shape {list(scales.shape)}; in FP8, a matrix of {rows} × "
                f"{columns} has one scale, {rows}, or {blocks[0]} × {blocks[1]}, of blocks of {FP8_BLOCK}"
            )
        for i in range(blocks[0]):
            factors = scales[..., i : i + 1, :].repeat(FP8_BLOCK, -1)[..., :columns]
            numbers[..., i * FP8_BLOCK : (i + 1) * FP8_BLOCK, :] *= factors
        return numbers


class Int8(Stored):
    """bitsandbytes' 8 bits: codes [out, in], and the largest absolute value of each output over 127, in `SCB`."""

    stored_dtype = "F16"

    @staticmethod
    def parts(name: str) -> list[str]:
        stem = name.removesuffix("weight")
        return [name, f"{stem}SCB", f"{stem}weight_format"]

    def view(self, name: str) -> np.ndarray:
        codes = self.array()
        scales = array(self.readers, self.parts(name)[1])
        return codes.astype(np.float32) * (scales.astype(np.float32)[:, None] / 127)

    def arrays(self, kind: Quantization) -> dict[str, np.ndarray] | None:
        scales = array(self.readers, self.parts(self.name)[1])
        return {"codes": self.array().T, "scales": scales[None]} if kind == "int8" else None


class Bits4(Stored):
    """bitsandbytes' 4 bits: see `quantized`. The 16 numbers, the size of a block and the shape are in the file.

    Two numbers to a byte, the first in the upper half, in the order of the tensor.
    """

    STATE = re.compile(r"(.+)\.quant_state\.bitsandbytes__\w+")

    @staticmethod
    def parts(name: str) -> list[str]:
        ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        kinds = ("nf4", "fp4")
        return [
            name,
            *(f"{name}.{end}" for end in ends),
            *(f"{name}.quant_state.bitsandbytes__{k}" for k in kinds),
        ]

    def shape(self) -> list[int]:
        state = next(n for n in self.parts(self.name)[5:] if n in self.readers)
        self.state: dict[str, Any] = json.loads(array(self.readers, state).tobytes())
        self.stored_dtype = NAMES[self.state["dtype"]]
        return list(self.state["shape"])

    def largest(self) -> np.ndarray:
        """Return the largest absolute values of blocks, float32, in the order of the tensor."""
        stored = self.array(".absmax")
        if stored.dtype != np.uint8:
            return stored.astype(np.float32)
        outer = self.array(".nested_absmax")
        size = int(self.state["nested_blocksize"])
        each = self.array(".nested_quant_map")[stored] * outer.repeat(size)[: stored.size]
        return (each + np.float32(self.state["nested_offset"])).astype(np.float32)

    def view(self, name: str) -> np.ndarray:
        packed = self.array().reshape(-1)
        numbers = self.array(".quant_map")
        size = int(self.state["blocksize"])
        both = numbers[np.stack([packed >> 4, packed & 15], -1).reshape(-1)[: math.prod(self.state["shape"])]]
        made: np.ndarray = both * self.largest().repeat(size)[: both.size]
        return made.astype(np.float32).reshape(self.state["shape"])

    def arrays(self, kind: Quantization) -> dict[str, np.ndarray] | None:
        out, size = self.state["shape"]
        nested = "nested_offset" in self.state
        same = self.state["blocksize"] == BLOCK and size % BLOCK == 0
        same &= kind == ("nf4" if nested else "nf4_plain") and np.array_equal(self.array(".quant_map"), NF4)
        if nested:
            same &= self.state["nested_blocksize"] == OUTER
            same &= np.array_equal(self.array(".nested_quant_map"), scale_values())
        if not same:
            return None
        arrays = {"codes": self.array(), "scales": self.array(".absmax")}
        arrays = {name: stored.reshape(out, -1).T for name, stored in arrays.items()}
        if nested:
            arrays["outer"] = self.array(".nested_absmax")
            arrays["mean"] = np.array(self.state["nested_offset"], np.float32)
        return arrays


def shown(readers: Mapping[str, Any]) -> dict[str, Any]:
    """Show the tensors that together hold one in few bits as the one that they hold."""
    found: dict[str, Callable[..., Stored]] = {}
    for name, reader in readers.items():
        if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in readers:
            found[name.removesuffix("_blocks")] = MXFP4
        elif state := Bits4.STATE.fullmatch(name):
            found[state[1]] = Bits4
        elif reader.dtype(name) == "I8" and f"{name.removesuffix('weight')}SCB" in readers:
            found[name] = Int8
        elif reader.dtype(name).startswith("F8") and {f"{name}_scale_inv", f"{name}_scale"} & set(readers):
            found[name] = FP8
    held = {part for name, kind in found.items() for part in kind.parts(name)}  # type: ignore[attr-defined]
    plain = {name: reader for name, reader in readers.items() if name not in held}
    return plain | {name: kind(name, readers) for name, kind in found.items()}
