"""The files of a journal, read without the trainer: this module imports no JAX."""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "journal"
MANIFEST = "manifest.json"
"""The member of a rollout's file that has the size of every other, whose checksums are the zip file's own; earlier
versions wrote none.
"""
MOST_MANIFEST = 2**20
PLAIN = (2**28, 200)
"""Of a file without a manifest: it unpacks to at most so many bytes, and so many for each of its own."""
END = struct.Struct("<4s4H2LH")
"""How a zip file without a comment ends; the fifth value is the number of its members."""
_NAME = re.compile(r"rollout-([0-9]{6,})\.zip")


@dataclass(frozen=True)
class RolloutFile:
    """What the file of a rollout holds.

    facts: `rounds`, `metrics`, `taken` and `rewards` of its JournalEntry. samples: what `Rollout.rows` returned.
    arrays: those of `Rollout.arrays`, by name.
    """

    facts: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    arrays: Mapping[str, np.ndarray]


def rollout_path(directory: Path, number: int) -> Path:
    """Name the file of a rollout in a journal's directory."""
    return directory / f"rollout-{number:06d}.zip"


def read_rollout(path: Path) -> RolloutFile:
    """Read the file of a rollout. Raises whatever is wrong with it: of zipfile, zlib, json and NumPy, any exception."""
    return _contents(_members(path))


def rollout_numbers(directory: Path) -> list[int]:
    """List the numbers of the rollouts in a journal's directory."""
    return sorted(rollout_files(directory))


def rollout_files(directory: Path) -> dict[int, Path]:
    """Return {number: file} of the rollouts in a directory."""
    named = [(_NAME.fullmatch(path.name), path) for path in directory.glob("rollout-*.zip")]
    return {int(match[1]): path for match, path in named if match}


def _members(path: Path) -> dict[str, bytes]:
    """Read the members of a rollout's file, each as long as it was written. Raises what is wrong with the file."""
    with zipfile.ZipFile(path) as file:
        sizes = {info.filename: info.file_size for info in file.infolist()}
        if len(sizes) < len(file.infolist()):
            raise ValueError("it has a member twice")
        if len(sizes) != _announced(path):  # one entry of its directory may have taken in the next
            raise ValueError("it has not the members that it announces")
        if MANIFEST not in sizes:
            at_once, times = PLAIN
            if sum(sizes.values()) > at_once + times * path.stat().st_size:
                raise ValueError("it unpacks to far more than a rollout")
            return {name: file.read(name) for name in sizes}
        if sizes[MANIFEST] > MOST_MANIFEST:
            raise ValueError(f"{MANIFEST} is too large")
        manifest = json.loads(file.read(MANIFEST))
        del sizes[MANIFEST]
        if manifest != sizes:
            raise ValueError(f"its members are not those of {MANIFEST}")
        return {name: file.read(name) for name in sizes}


def _announced(path: Path) -> int:
    """Return how many members the end of a zip file says that it has."""
    with path.open("rb") as file:
        file.seek(-END.size, os.SEEK_END)
        count: int = END.unpack(file.read())[4]
    return count


def _contents(members: dict[str, bytes]) -> RolloutFile:
    """Decode the members of a file. Raises what is wrong with them."""
    facts, samples = json.loads(members.pop("rollout.json")), json.loads(members.pop("samples.json"))
    unknown = [name for name in members if not name.endswith(".npy")]
    if unknown:
        raise ValueError(f"it has a member {unknown[0]!r}")
    if not isinstance(samples, list) or not all(isinstance(row, dict) for row in samples):
        raise ValueError("samples.json is not a list of objects")
    arrays = {name.removesuffix(".npy"): _array(name, content) for name, content in members.items()}
    return RolloutFile(facts, samples, arrays)


def _array(name: str, content: bytes) -> np.ndarray:
    """Read an array. Raises ValueError where its header announces more, or less, than there is."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"{name} has not the size that it begins with")
    file.seek(0)
    array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array
