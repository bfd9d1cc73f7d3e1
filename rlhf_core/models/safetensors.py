"""The safetensors format: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes.

Files are read through a memory map, so that a device reads only its own part, and written tensor by tensor, so that the
host never holds more than one stacked parameter.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from rlhf_core.errors import InputError, reading

DTYPES: Mapping[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
BLOCK = (16, 2048)
"""Block of a transposed matrix whose cache lines all stay in a core's cache."""


class TensorFile:
    """One file, whose header the library safetensors checks. Raises InputError naming the file where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "fetch or save it again"):
            with safe_open(path, framework="numpy"):
                pass
            with path.open("rb") as file:
                length = struct.unpack("<Q", file.read(8))[0]
                self.header: dict[str, Any] = json.loads(file.read(length))
        self.header.pop("__metadata__", None)
        self._base = 8 + length
        self._bytes = np.memmap(path, np.uint8, "r")

    def dtype(self, name: str) -> str:
        return str(self.header[name]["dtype"])

    def view(self, name: str) -> np.ndarray:
        """Return the tensor as a view of the file."""
        entry = self.header[name]
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise InputError(f"{self.path}: '{name}' has dtype {entry['dtype']}; only {known} can be read")
        tensor: np.ndarray = self.raw(name).reshape(-1).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return tensor

    def description(self, name: str) -> tuple[str, Sequence[int], int]:
        """Describe a tensor for `Writer`."""
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        return entry["dtype"], entry["shape"], end - begin

    def raw(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor, uint8; in the tensor's shape if its elements are bytes."""
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        raw: np.ndarray = self._bytes[self._base + begin : self._base + end]
        return raw.reshape(entry["shape"]) if entry["dtype"] == "U8" else raw


def copy(tensor: np.ndarray, out: np.ndarray) -> None:
    """Copy a tensor, possibly a transposed view of a matrix, into `out`, float32.

    A transposed matrix is copied in blocks, cast before they are transposed: NumPy's own loop over the whole reads a
    cache line per element, and takes twice the time.
    """
    if tensor.ndim < 2 or tensor.strides[1] <= tensor.strides[0]:
        out[...] = tensor
        return
    rows, columns = BLOCK
    for i in range(0, tensor.shape[0], rows):
        for j in range(0, tensor.shape[1], columns):
            block = tensor[i : i + rows, j : j + columns]
            out[i : i + rows, j : j + columns] = block.T.astype(np.float32).T


class Writer:
    """Writes files of at most `limit` bytes of tensors each, whose tensors may come in any order.

    tensors: {name: (dtype as in a header, such as "BF16", shape, bytes)}, in the order of the file.
    A context manager. A single file is `model.safetensors`; several come with `model.safetensors.index.json`.
    """

    def __init__(
        self, directory: Path, tensors: Mapping[str, tuple[str, Sequence[int], int]], limit: int
    ) -> None:
        shards: list[list[str]] = [[]]
        filled = 0
        for name, (_, _, size) in tensors.items():
            if shards[-1] and filled + size > limit:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        self._places: dict[str, tuple[Any, int, str]] = {}
        self._files: list[Any] = []
        files: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            single = "model.safetensors"
            file = single if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            files |= dict.fromkeys(names, file)
            self._open(directory / file, {name: tensors[name] for name in names})
        if len(shards) > 1:
            metadata = {
                "total_parameters": sum(math.prod(shape) for _, shape, _ in tensors.values()),
                "total_size": sum(size for _, _, size in tensors.values()),
            }
            index = {"metadata": metadata, "weight_map": files}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _open(self, path: Path, tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, shape, size) in tensors.items():
            offsets = [offset, offset + size]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
        file = path.open("wb")
        self._files.append(file)
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (dtype, _, _) in tensors.items():
            self._places[name] = (file, 8 + len(text) + header[name]["data_offsets"][0], dtype)

    def put(self, name: str, value: np.ndarray, first: int = 0) -> bool:
        """Write a tensor, or a part of it from element `first` on; return whether all values as written are finite."""
        file, offset, dtype = self._places[name]
        with np.errstate(over="ignore"):
            flat = np.ascontiguousarray(value, DTYPES[dtype]).reshape(-1)
        file.seek(offset + first * flat.itemsize)
        file.write(flat.view(np.uint8))
        # Of all ones, which no finite value has.
        exponent = np.array([np.inf], flat.dtype).view(f"u{flat.itemsize}")
        return not ((flat.view(exponent.dtype) & exponent) == exponent).any()

    def copy(self, name: str, reader: TensorFile) -> None:
        """Write a tensor of another file, byte by byte."""
        file, offset, _ = self._places[name]
        file.seek(offset)
        file.write(reader.raw(name).reshape(-1))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def described(dtype: str, shape: Sequence[int]) -> tuple[str, Sequence[int], int]:
    """Describe a tensor for `Writer`. dtype: a key of NAMES."""
    return NAMES[dtype], shape, math.prod(shape) * DTYPES[NAMES[dtype]].itemsize
