"""What a compiled program does, counted in its HLO text: products, bytes, and what devices send each other.

XLA's own count (`compiled.cost_analysis()`) takes the body of every loop once. Here a body counts as often as the loop
runs: `known_trip_count` where the compiler found it, else a number that the caller knows.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}
"""Bytes of an element, where the name's number of bits does not say it."""
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional"}
"""Instructions that move nothing themselves."""
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)")
HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """One line. shape: as it is written, a tuple's in parentheses. operands: names within its computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool


@dataclass
class Counts:
    """Of one device. collectives: {kind: [how many, bytes]}."""

    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))

    def add(self, other: Counts, times: float = 1.0) -> None:
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        for kind, (number, size) in other.collectives.items():
            self.collectives[kind][0] += times * number
            self.collectives[kind][1] += times * size


def count(text: str, trips: float = 1.0) -> Counts:
    """What one run of a program does; text: `compiled.as_text()`.

    flops: of products (`dot`), two a multiplication and addition. bytes: what every instruction reads and writes as
    if nothing stayed in a cache; of slices and gathers the part that is touched. A collective counts the larger of what
    it takes and gives. trips: how often a loop runs whose number of rounds depends on data. Of a condition's branches
    the one with most products and bytes counts.

    Raises ValueError for instructions that may hide products.
    """
    computations, entry = parse(text)
    done: dict[str, Counts] = {}

    def of(name: str) -> Counts:
        if name not in done:
            done[name] = total = Counts()
            inside = computations[name]
            for each in inside.values():
                total.add(own(each, inside))
        return done[name]

    def own(each: Instruction, inside: Mapping[str, Instruction]) -> Counts:
        found = Counts()
        called = CALLED.findall(each.attributes)
        if each.opcode == "while":
            known = TRIPS.search(each.attributes)
            found.add(of(called[0]), float(known[1]) if known else trips)
        elif each.opcode == "call":
            found.add(of(called[0]))
        elif each.opcode == "conditional":
            listed = BRANCHES.search(each.attributes)
            names = re.findall(r"%?([\w.-]+)", listed[1]) if listed else called
            found.add(max(map(of, names), key=lambda branch: (branch.flops, branch.bytes)))
        elif each.opcode == "fusion":
            body = computations[called[0]]
            found.flops = of(called[0]).flops
            found.bytes = _fusion_bytes(each, inside, body)
        elif each.opcode == "dot":
            found.flops = _dot_flops(each, inside)
        elif each.opcode in ("convolution", "custom-call") and re.search("conv|matmul|gemm", str(each)):
            raise ValueError(f"products that are not counted: {each.opcode} {each.name}")
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            size = _collective_bytes(each, inside)
            found.collectives[kind] = [1.0, size]
        if each.opcode not in FREE and each.opcode != "fusion" and not each.opcode.endswith("-done"):
            found.bytes = _bytes(each, inside)
        return found

    return of(entry)


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """({computation: {name: instruction}}, the entry's name)."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    entry = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            if header := HEADER.match(line):
                current = computations[header[2]] = {}
                entry = header[2] if header[1] else entry
        elif found := INSTRUCTION.match(line):
            each = _instruction(found[1], found[2], "ROOT " in line[: found.start(1)])
            current[each.name] = each
    return computations, entry


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    shape, rest = _bracketed(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    operands, attributes = _bracketed("(" + rest)
    return Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.-]+)", operands)), attributes, is_root)


def _bracketed(text: str) -> tuple[str, str]:
    """What is within the parenthesis that a text starts with, both included, and what follows."""
    depth = 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[: at + 1], text[at + 1 :]
    raise ValueError(f"no closing parenthesis: {text[:80]}")


def _arrays(shape: str) -> Iterator[tuple[str, list[int]]]:
    for dtype, sizes in ARRAY.findall(re.sub(r"/\*.*?\*/", "", shape)):
        yield dtype, [int(size.lstrip("<=")) for size in sizes.split(",") if size]


def shape_bytes(shape: str) -> float:
    """Of an array or a tuple, as HLO writes it: `f32[8,256]{1,0}`, `(s32[], bf16[4])`."""
    total = 0.0
    for dtype, sizes in _arrays(shape):
        if dtype in SIZES:
            item = SIZES[dtype]
        else:
            bits = re.match(r"[a-z]+(\d+)", dtype)
            item = int(bits[1]) / 8 if bits else 0
        total += item * math.prod(sizes)
    return total


def _operand_bytes(each: Instruction, inside: Mapping[str, Instruction]) -> list[float]:
    return [shape_bytes(inside[name].shape) for name in each.operands if name in inside]


def _dot_flops(each: Instruction, inside: Mapping[str, Instruction]) -> float:
    (_, left), *_ = _arrays(inside[each.operands[0]].shape)
    (_, out), *_ = _arrays(each.shape)
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
    contracted = [int(axis) for axis in match[1].split(",") if axis] if match else []
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _collective_bytes(each: Instruction, inside: Mapping[str, Instruction]) -> float:
    taken, given = sum(_operand_bytes(each, inside)), shape_bytes(each.shape)
    # An asynchronous start gives what it took beside the result, or only that.
    return max(taken, given - taken if each.opcode.endswith("-start") else given)


def _bytes(each: Instruction, inside: Mapping[str, Instruction]) -> float:
    taken, given = _operand_bytes(each, inside), shape_bytes(each.shape)
    if each.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * given + sum(taken[1:])
    if each.opcode == "dynamic-update-slice":
        return 2 * taken[1]
    if each.opcode == "scatter":
        return sum(taken[1:]) + taken[-1]
    return given + sum(taken)


def _fusion_bytes(
    each: Instruction, inside: Mapping[str, Instruction], body: Mapping[str, Instruction]
) -> float:
    """What a fusion reads of its operands, and writes."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for one in body.values():
        for name in one.operands:
            users[name].append(one)
    (root,) = (one for one in body.values() if one.is_root)
    while root.opcode == "bitcast":
        root = body[root.operands[0]]
    total, in_place = shape_bytes(each.shape), ""
    if root.opcode == "dynamic-update-slice":
        total, in_place = shape_bytes(body[root.operands[1]].shape), _source(root.operands[0], body)
    parameters = [one for one in body.values() if one.opcode == "parameter"]
    for one in parameters:
        reading = users[one.name]
        if one.name == in_place:
            total += shape_bytes(body[root.operands[1]].shape)
        elif reading and all(
            user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == one.name
            for user in reading
        ):
            total += sum(shape_bytes(user.shape) for user in reading)
        else:
            total += shape_bytes(one.shape)
    return total


def _source(name: str, body: Mapping[str, Instruction]) -> str:
    while body[name].opcode == "bitcast":
        name = body[name].operands[0]
    return name
