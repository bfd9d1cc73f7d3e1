"""The safetensors format: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes.

Read through a memory map, so that a device reads only its own part; written tensor by tensor, so that no more
than one stacked parameter is ever held on the host.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlhf_core.errors import InputError

DTYPES: Mapping[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
BLOCK = (16, 2048)
"""Of a matrix that is stored transposed: the lines of memory that a block touches stay in a core's cache."""


class Reader:
    """One file. Raises InputError naming the file, and the key, where it is cut short or not safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > size - 8:
                raise InputError(f"{path}: not a safetensors file, or cut short: fetch or save it again")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise InputError(
                    f"{path}: the safetensors header is damaged ({error}): fetch it again"
                ) from None
        if not isinstance(header, dict):
            raise InputError(f"{path}: the safetensors header is not an object: fetch it again")
        header.pop("__metadata__", None)
        self.header: dict[str, Any] = header
        self._base = 8 + length
        for name in header:
            self._check(name, size)
        self._bytes = np.memmap(path, np.uint8, "r")

    def _check(self, name: str, size: int) -> None:
        try:
            entry = self.header[name]
            begin, end = (int(x) for x in entry["data_offsets"])
            count = math.prod(int(x) for x in entry["shape"])
            dtype = entry["dtype"]
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{self.path}: the header's entry for '{name}' is damaged: fetch it again"
            ) from None
        if begin < 0 or self._base + end > size:
            raise InputError(
                f"{self.path}: cut short: '{name}' ends after the end of the file: fetch it again"
            )
        if dtype in DTYPES and end - begin != count * DTYPES[dtype].itemsize:
            raise InputError(
                f"{self.path}: '{name}' has {end - begin} bytes, not those of {dtype} {entry['shape']}"
            )

    def dtype(self, name: str) -> str:
        return str(self.header[name]["dtype"])

    def view(self, name: str) -> np.ndarray:
        """The tensor, as a view of the file."""
        entry = self.header[name]
        if entry["dtype"] not in DTYPES:
            known = ", ".join(DTYPES)
            raise InputError(f"{self.path}: '{name}' has dtype {entry['dtype']}; only {known} can be read")
        begin, end = entry["data_offsets"]
        raw = self._bytes[self._base + begin : self._base + end]
        tensor: np.ndarray = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return tensor


def copy(tensor: np.ndarray, out: np.ndarray) -> None:
    """Write a tensor of at most two axes, as it is or a transposed view, into `out`, float32.

    A transposed matrix is copied block by block, cast before it is turned: NumPy's own loop over the whole reads a
    line of memory for each of its elements, and takes twice the time.
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
    """Files of at most `limit` bytes of tensors each, filled in any order after their sizes are known.

    shapes: {tensor name: shape}, in the order of the file; dtype: a key of NAMES.
    A context manager. A single file is `model.safetensors`; several come with `model.safetensors.index.json`.
    """

    def __init__(
        self, directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, limit: int
    ) -> None:
        self._dtype = DTYPES[NAMES[dtype]]
        sizes = {name: math.prod(shape) * self._dtype.itemsize for name, shape in shapes.items()}
        shards: list[list[str]] = [[]]
        filled = 0
        for name, size in sizes.items():
            if shards[-1] and filled + size > limit:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        self._places: dict[str, tuple[Any, int]] = {}
        self._files: list[Any] = []
        files: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            single = "model.safetensors"
            file = single if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            files |= dict.fromkeys(names, file)
            self._open(directory / file, names, shapes, sizes, NAMES[dtype])
        if len(shards) > 1:
            count = sum(math.prod(shape) for shape in shapes.values())
            metadata = {"total_parameters": count, "total_size": sum(sizes.values())}
            index = {"metadata": metadata, "weight_map": files}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _open(
        self, path: Path, names: list[str], shapes: Mapping[str, Any], sizes: dict[str, int], dtype: str
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            offsets = [offset, offset + sizes[name]]
            header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": offsets}
            offset += sizes[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
        file = path.open("wb")
        self._files.append(file)
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            self._places[name] = (file, 8 + len(text) + header[name]["data_offsets"][0])

    def put(self, name: str, value: np.ndarray) -> None:
        file, offset = self._places[name]
        file.seek(offset)
        file.write(np.ascontiguousarray(value, self._dtype).reshape(-1).view(np.uint8))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()
