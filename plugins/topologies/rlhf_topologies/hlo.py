"""The instructions of a compiled program, read from its HLO text: shapes, operands, and what they call.

The text is that of `compiled.as_text()`, of CPUs, GPUs and TPUs alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)")
HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
LISTED_GROUPS = re.compile(r"replica_groups=\{(\{.*?\})\}")
PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")
SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}
"""Bytes of an element, where the name's number of bits does not say it."""
FAST_MEMORY = "S(1)"
"""In a layout of TPUs: the array is in the memory beside the units, not in the device's main memory."""


@dataclass(frozen=True)
class Instruction:
    """One line. shape: as it is written, a tuple's in parentheses. operands: names within its computation; of a
    parameter its number, of a constant its value.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Return ({computation: {name: instruction}}, the entry's name)."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            if header := HEADER.match(line):
                current = computations[header[2]] = {}
                entry = header[2] if header[1] else entry
        elif match := INSTRUCTION.match(line):
            each = _instruction(match[1], match[2], "ROOT " in line[: match.start(1)])
            current[each.name] = each
    return computations, entry


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    shape, rest = _bracketed(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    operands, attributes = _bracketed("(" + rest)
    if opcode in ("parameter", "constant"):
        return Instruction(name, shape, opcode, (operands[1:-1],), attributes, is_root)
    return Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.-]+)", operands)), attributes, is_root)


def _bracketed(text: str) -> tuple[str, str]:
    """Split after the parenthesis that a text starts with."""
    depth = 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[: at + 1], text[at + 1 :]
    raise ValueError(f"no closing parenthesis: {text[:80]}")


def arrays(shape: str, *, main_memory: bool = False) -> Iterator[tuple[str, list[int]]]:
    """Return the dtype and sizes of every array of a shape; main_memory: of those that are there alone."""
    for dtype, sizes, layout in ARRAY.findall(re.sub(r"/\*.*?\*/", "", shape)):
        if not (main_memory and FAST_MEMORY in layout):
            yield dtype, [int(size.lstrip("<=")) for size in sizes.split(",") if size]


def shape_bytes(shape: str, *, main_memory: bool = False) -> float:
    """Count the bytes of an array or a tuple, as HLO writes it: `f32[8,256]{1,0}`, `(s32[], bf16[4])`."""
    return sum(_item(dtype) * math.prod(sizes) for dtype, sizes in arrays(shape, main_memory=main_memory))


def _item(dtype: str) -> float:
    if dtype in SIZES:
        return SIZES[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0


def called_by(each: Instruction) -> list[str]:
    """Return the computations that an instruction runs, a loop's condition left out."""
    listed = BRANCHES.search(each.attributes) if each.opcode == "conditional" else None
    return re.findall(r"%?([\w.-]+)", listed[1]) if listed else CALLED.findall(each.attributes)


def unwrapped(name: str, inside: Mapping[str, Instruction]) -> Instruction:
    """Find where a value is from, through copies."""
    while inside[name].opcode in ("copy", "bitcast", "copy-start", "copy-done", "convert"):
        name = inside[name].operands[0]
    return inside[name]


def tuple_index(each: Instruction) -> int:
    """Return which element of a tuple `get-tuple-element` takes."""
    return int(re.findall(r"index=(\d+)", each.attributes)[0])


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """Read the groups of devices that a collective works in."""
    if found := GROUPS.search(attributes):
        groups: list[list[int]] = _device_order(found[2], found[3]).reshape(_integers(found[1])).tolist()
        return groups
    if found := MESH_GROUPS.search(attributes):
        return _mesh_groups(*found.groups())
    listed = LISTED_GROUPS.search(attributes) or PAIRS.search(attributes)
    if listed:
        return [[int(n) for n in re.findall(r"\d+", group)] for group in listed[1].split("},{")]
    return [list(range(devices))]


def _mesh_groups(axes: str, shape: str | None, transposed: str | None, along: str) -> list[list[int]]:
    """Read groups along some axes of a mesh: `'a'=2,'b'=4`, the devices as for `_device_order`, and `'b'`.

    Part of an axis is written with the product of what lies before it and its own size: `'b':(2)2`.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    split: list[int] = []
    apart: list[int] = []
    together: list[int] = []
    for name, size in sizes.items():
        found = re.search(rf"'{name}'(?::\((\d+)\)(\d+))?", along)
        before, inside = (int(found[1]), int(found[2])) if found and found[1] else (1, size if found else 1)
        apart += [len(split), len(split) + 2]
        together.append(len(split) + 1)
        split += [before, inside, size // before // inside]
    order = _device_order(shape or str(math.prod(split)), transposed).reshape(split)
    members = math.prod(split[at] for at in together)
    groups: list[list[int]] = order.transpose(apart + together).reshape(-1, members).tolist()
    return groups


def _device_order(shape: str, transposed: str | None) -> Any:
    """Return the devices in the order that `[2,4]T(1,0)` says: counted in one shape, and its axes exchanged."""
    order = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return order if transposed is None else order.transpose(_integers(transposed))


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
