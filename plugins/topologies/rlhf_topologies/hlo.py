"""Count what a compiled program does, in its HLO text: products, bytes, and what devices send each other.

The text is `compiled.as_text()`, of CPUs, GPUs and TPUs alike. XLA's own count (`compiled.cost_analysis()`) takes the
body of every loop once, and is empty for GPUs. Here a body counts as often as the loop runs, by `known_trip_count`;
loops whose number of rounds depends on data are counted by themselves.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VERSION = 6
"""Of what is counted; results that another version counted are counted again."""
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional"),
    *("fusion", "async-start"),
}
"""Instructions that move nothing themselves, or whose bytes are counted with what they call."""
ENDED = ("-done", "-update")
"""Suffixes of what follows an instruction that was started and counted before."""
SLICES = ("dynamic-slice", "slice", "gather")
SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}
"""Bytes of an element, where the name's number of bits does not say it."""
FAST_MEMORY = "S(1)"
"""In a layout of TPUs: the array is in the memory next to the compute units, not in main memory."""

ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^{}]*\})?")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)")
HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
COST = re.compile(r'"(flops|bytes_accessed)": ?"(\d+)"')
GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
LISTED_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")


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


Computation = Mapping[str, Instruction]


@dataclass
class Counts:
    """Of one device.

    products: {dtype of the factors: operations, two per multiplication and addition}. bytes: read and written in main
    memory, if nothing stayed in a cache. collectives: {kind: [how many, bytes]}, of each the larger of what it takes
    and gives. sent: bytes that the device sends at least, to others of its machine; network: to other machines.
    uncounted: calls that may hide products, sorted.
    """

    products: dict[str, float] = field(default_factory=dict)
    bytes: float = 0.0
    collectives: dict[str, list[float]] = field(default_factory=dict)
    sent: float = 0.0
    network: float = 0.0
    uncounted: list[str] = field(default_factory=list)

    @property
    def flops(self) -> float:
        return sum(self.products.values())

    def add(self, other: Counts, times: float = 1.0) -> None:
        """Add another count `times` times."""
        for dtype, flops in other.products.items():
            self.products[dtype] = self.products.get(dtype, 0.0) + times * flops
        for kind, (number, size) in other.collectives.items():
            before = self.collectives.get(kind, [0.0, 0.0])
            self.collectives[kind] = [before[0] + times * number, before[1] + times * size]
        self.bytes += times * other.bytes
        self.sent += times * other.sent
        self.network += times * other.network
        self.uncounted = sorted({*self.uncounted, *other.uncounted})


def count(text: str, trips: float = 1.0) -> Counts:
    """Count what one run of a program does.

    products: of `dot` and of what TPUs and GPUs make of it. bytes: of slices and gathers the part that is touched.
    trips: how often a loop runs whose number of rounds depends on data. Of a condition's branches the one with most
    products and bytes counts.

    Raises ValueError for instructions that may hide products.
    """
    reader = ProgramReader(text, trips)
    total = reader.of(reader.entry)
    if total.uncounted:
        raise ValueError(f"products that are not counted: {', '.join(total.uncounted)}")
    return total


def count_apart(
    text: str, machine: int | None = None, *, trips: float | None = None
) -> tuple[Counts, list[Counts]]:
    """Count what one run of a program does outside of loops whose number of rounds depends on data, and a round of each
    such loop that no other one contains; nothing of those within them.

    machine: devices of each machine; None: all are in one. Partitions are numbered machine by machine. trips: rounds of
    these loops, which then count with the rest; None: they count apart.
    """
    reader = ProgramReader(text, trips, machine)
    loops = [] if trips is not None else [reader.of(body) for body in reader.outer_loops()]
    return reader.of(reader.entry), loops


class ProgramReader:
    """Reads a program's computations, and counts each of them once."""

    def __init__(self, text: str, trips: float | None = None, machine: int | None = None) -> None:
        """trips: rounds of loops that do not say it; None: do not count these."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if not line.startswith(" "):
                header = HEADER.match(line)
                if header:
                    current = self.computations[header[2]] = {}
                    self.entry = header[2] if header[1] else self.entry
                continue
            match = INSTRUCTION.match(line)
            if match:
                each = _instruction(match[1], match[2], "ROOT " in line[: match.start(1)])
                current[each.name] = each
        partitions = re.search(r"num_partitions=(\d+)", text[:20_000])
        self.devices = int(partitions[1]) if partitions else 1
        self.trips = trips
        self.machine = machine or self.devices
        self._done: dict[str, Counts] = {}

    def of(self, name: str) -> Counts:
        """Count a computation with what it calls."""
        if name not in self._done:
            self._done[name] = total = Counts()
            inside = self.computations[name]
            for each in inside.values():
                total.add(self._one(each, inside))
        return self._done[name]

    def outer_loops(self, name: str | None = None) -> list[str]:
        """Return the outermost loop bodies without a known number of rounds."""
        inside = self.computations[name or self.entry]
        bodies = []
        for each in inside.values():
            if each.opcode == "while" and self._rounds(each, inside) is None:
                bodies += called_by(each)
            elif each.opcode in ("while", "call", "conditional"):
                bodies += [body for called in called_by(each) for body in self.outer_loops(called)]
        return bodies

    def _rounds(self, loop: Instruction, inside: Computation) -> float | None:
        """Return how often a loop runs: what XLA says of it, else by a counter from one constant to another in constant
        steps; None where it depends on data.
        """
        known = TRIPS.search(loop.attributes)
        if known:
            return float(known[1])
        condition = self.computations[re.findall(r"condition=%?([\w.-]+)", loop.attributes)[0]]
        body = self.computations[called_by(loop)[0]]
        test, following = _root(condition), _root(body)
        state = inside[loop.operands[0]]
        if "direction=LT" not in test.attributes:
            return None
        if state.opcode != "tuple" or following.opcode != "tuple":
            return None

        def value(name: str, computation: Computation) -> int | None:
            """Return a constant, or what the loop begins with in an element of its state."""
            found = _unwrapped(name, computation)
            if found.opcode == "get-tuple-element" and computation is not inside:
                return value(state.operands[_tuple_index(found)], inside)
            if found.opcode == "constant":
                return int(found.operands[0])
            return None

        counter = _unwrapped(test.operands[0], condition)
        if counter.opcode != "get-tuple-element":
            return None
        step = _unwrapped(following.operands[_tuple_index(counter)], body)
        begin, end = (value(name, condition) for name in test.operands)
        if step.opcode != "add":
            return None
        by = value(step.operands[-1], body)
        if begin is None or end is None or not by:
            return None
        return float(math.ceil((end - begin) / by))

    def _one(self, each: Instruction, inside: Computation) -> Counts:
        """Count one instruction with what it calls."""
        total = Counts()
        called = called_by(each)
        if each.opcode == "while":
            known = self._rounds(each, inside)
            rounds = self.trips if known is None else known
            if rounds:
                total.add(self.of(called[0]), rounds)
        elif each.opcode in ("call", "async-start"):
            for name in called:
                total.add(self.of(name))
        elif each.opcode == "conditional":
            total.add(max(map(self.of, called), key=lambda branch: (branch.flops, branch.bytes)))
        elif each.opcode == "fusion":
            total.add(self.of(called[0]))
            total.bytes = _fusion_bytes(each, inside, self.computations[called[0]])
            if called[0].startswith("all-reduce-scatter"):  # a TPU's reduce-scatter, which sends half as much
                total.sent, total.network = total.sent / 2, total.network / 2
                total.collectives = {"reduce-scatter": total.collectives.get("all-reduce", [0.0, 0.0])}
        elif each.opcode in ("dot", "convolution"):
            flops_of = _dot_flops if each.opcode == "dot" else _convolution_flops
            flops = flops_of(each, inside)
            dtype, _, _ = _first_array(each.operands[0], inside)
            total.products[dtype] = flops
        elif each.opcode == "custom-call":
            _count_call(each, inside, total)
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            self._send(kind, each, inside, total)
        if each.opcode not in FREE and not each.opcode.endswith(ENDED):
            total.bytes += _bytes(each, inside)
        return total

    def _send(self, kind: str, each: Instruction, inside: Computation, total: Counts) -> None:
        """Count a collective, and what the best algorithm sends for it over each kind of wire."""
        taken = sum(shape_bytes(inside[name].shape) for name in each.operands if name in inside)
        given = shape_bytes(each.shape)
        # An asynchronous start returns its operands with the result, or the result alone.
        size = max(taken, given - taken if each.opcode.endswith("-start") else given)
        total.collectives[kind] = [1.0, size]
        groups = device_groups(each.attributes, self.devices)
        members = max(map(len, groups), default=1)
        machines = max((len({device // self.machine for device in group}) for group in groups), default=1)
        if kind in ("collective-permute", "collective-broadcast"):
            total.network, total.sent = (size, 0.0) if machines > 1 else (0.0, size)
            return
        size *= 2 if kind == "all-reduce" else 1
        total.sent = size * (members - 1) / members
        if machines > 1:
            # Each machine has to get the parts of the others, through the network ports of all members in it.
            ports = 1 if "all-to-all" in kind else members / machines
            total.network = size * (machines - 1) / machines / ports


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


def arrays(shape: str) -> Iterator[tuple[str, list[int], str]]:
    """Return the dtype, sizes and layout of every array of a shape: `f32[8,256]{1,0}`, `(s32[], bf16[4])`."""
    for dtype, sizes, layout in ARRAY.findall(re.sub(r"/\*.*?\*/", "", shape)):
        yield dtype, [int(size.lstrip("<=")) for size in sizes.split(",") if size], layout


def shape_bytes(shape: str, *, main_memory: bool = False) -> float:
    """Count the bytes of a shape's arrays; main_memory: only of those in main memory."""
    total = 0.0
    for dtype, sizes, layout in arrays(shape):
        if not (main_memory and FAST_MEMORY in layout):
            bits = re.match(r"[a-z]+(\d+)", dtype)
            total += SIZES.get(dtype, int(bits[1]) / 8 if bits else 0) * math.prod(sizes)
    return total


def called_by(each: Instruction) -> list[str]:
    """Return the computations that an instruction runs, a loop's condition left out."""
    listed = BRANCHES.search(each.attributes) if each.opcode == "conditional" else None
    return re.findall(r"%?([\w.-]+)", listed[1]) if listed else CALLED.findall(each.attributes)


def _root(computation: Computation) -> Instruction:
    """Return the instruction whose result is the computation's."""
    return next(one for one in computation.values() if one.is_root)


def _unwrapped(name: str, inside: Computation) -> Instruction:
    """Find where a value is from, through copies."""
    while inside[name].opcode in ("copy", "bitcast", "copy-start", "copy-done", "convert"):
        name = inside[name].operands[0]
    return inside[name]


def _tuple_index(each: Instruction) -> int:
    return int(re.findall(r"index=(\d+)", each.attributes)[0])


def _first_array(name: str, inside: Computation) -> tuple[str, list[int], str]:
    return next(arrays(inside[name].shape))


def _dot_flops(each: Instruction, inside: Computation) -> float:
    _, left, _ = _first_array(each.operands[0], inside)
    _, out, _ = next(arrays(each.shape))
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
    contracted = [int(axis) for axis in match[1].split(",") if axis] if match else []
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _convolution_flops(each: Instruction, inside: Computation) -> float:
    """Count the products of a convolution, which TPUs make of every `dot`: its batch, free and contracted axes become
    axes that a window slides over, dilated or padded so that each element meets its own partner alone.

    Of other convolutions, padding counts.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.attributes)
    assert labels is not None
    shapes = [*(_first_array(name, inside) for name in each.operands[:2]), next(arrays(each.shape))]
    left, right, out = (
        dict(zip(axes, sizes, strict=True))
        for axes, (_, sizes, _) in zip(labels.groups(), shapes, strict=True)
    )
    flops = 2.0 * out["b"] * out["f"] * right["i"]
    for axis in filter(str.isdigit, out):
        x, y, z = left[axis], right[axis], out[axis]
        flops *= x if x == y == z else min(x * y, x * z, y * z)
    return flops


def _count_call(each: Instruction, inside: Computation, total: Counts) -> None:
    """Count the products of a kernel: those that it states; of cuDNN's attention two forward and five backward."""
    found = TARGET.search(each.attributes)
    target = found[1] if found else ""
    stated = stated_cost(each)
    if stated:
        largest = max(each.operands, key=lambda name: shape_bytes(inside[name].shape))
        total.products[_first_array(largest, inside)[0]] = stated.get("flops", 0.0)
    elif "fmha" in target:
        (dtype, query, _), (_, key, _) = (_first_array(name, inside) for name in each.operands[:2])
        products = 5 if "Backward" in target else 2
        total.products[dtype] = products * 2.0 * math.prod(query) * key[1]
    elif re.search(r"conv|matmul|gemm|\bdot\b|triton|tpu_custom_call|mosaic", target):
        total.uncounted = [target]


def stated_cost(each: Instruction) -> dict[str, float]:
    """Return the `flops` and `bytes_accessed` that a Pallas kernel states: on TPUs its cost estimate, on GPUs, which
    drop that, its metadata. Empty for all others.
    """
    attributes = each.attributes.replace("\\22", '"') if each.opcode == "custom-call" else ""
    return {name: float(number) for name, number in COST.findall(attributes)}


def _traffic(shape: str) -> float:
    return shape_bytes(shape, main_memory=True)


def _bytes(each: Instruction, inside: Computation) -> float:
    stated = stated_cost(each).get("bytes_accessed")
    if stated is not None:
        return stated
    given = _traffic(each.shape)
    taken = [_traffic(inside[name].shape) for name in each.operands if name in inside]
    if each.opcode in SLICES:
        return 2 * given + sum(taken[1:])
    if each.opcode == "dynamic-update-slice":
        return 2 * taken[1]
    if each.opcode == "scatter":
        return sum(taken[1:]) + taken[-1]
    return given + sum(taken)


def _fusion_bytes(each: Instruction, inside: Computation, body: Computation) -> float:
    """Count what a fusion reads of its operands, and writes: of slices and of updates in place the part."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for one in body.values():
        for name in one.operands:
            users[name].append(one)

    def readers(name: str) -> list[tuple[Instruction, str]]:
        """Return what reads an array, and the name by which it does: its own, or that of a bitcast."""
        found = []
        for user in users[name]:
            if user.opcode == "bitcast":
                found += readers(user.name)
            else:
                found.append((user, name))
        return found

    def source(name: str) -> Instruction:
        """Find where an array is from, through bitcasts."""
        while body[name].opcode == "bitcast":
            name = body[name].operands[0]
        return body[name]

    root = source(_root(body).name)
    total = _traffic(each.shape)
    in_place = ""
    if root.opcode == "dynamic-update-slice":
        total = 2 * _traffic(body[root.operands[1]].shape)
        in_place = source(root.operands[0]).name
    for one in body.values():
        if one.opcode != "parameter":
            continue
        number = int(one.operands[0])
        if number >= len(each.operands):
            continue
        given = inside.get(each.operands[number])  # layouts in the body may lack what its caller's have
        if given is None or one.name == in_place or FAST_MEMORY in given.shape:
            continue
        reading = readers(one.name)
        sliced = all(user.opcode in SLICES and user.operands[0] == name for user, name in reading)
        if reading and sliced:
            total += sum(_traffic(user.shape) for user, _ in reading)
        else:
            total += _traffic(given.shape)
    return total


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """Read the groups of devices that a collective works in."""
    groups: list[list[int]]
    found = GROUPS.search(attributes)
    if found:
        groups = _device_order(found[2], found[3]).reshape(_integers(found[1])).tolist()
        return groups
    found = MESH_GROUPS.search(attributes)
    if found:
        groups = _mesh_groups(*found.groups())
        return groups
    listed = LISTED_GROUPS.search(attributes)
    if listed:
        return [_integers(group) for group in listed[1].split("},{")]
    return [list(range(devices))]


def _mesh_groups(axes: str, shape: str | None, transposed: str | None, along: str) -> Any:
    """Read groups along some axes of a mesh: `'a'=2,'b'=4`, the devices as for `_device_order`, and `'b'`.

    Part of an axis is written with the product of what lies before it and its own size: `'b':(2)2`.
    """
    split: list[int] = []
    for name, size in re.findall(r"'(\w+)'=(\d+)", axes):
        found = re.search(rf"'{name}'(?::\((\d+)\)(\d+))?", along)
        before, inside = 1, 1
        if found and found[1]:
            before, inside = int(found[1]), int(found[2])
        elif found:
            inside = int(size)
        split += [before, inside, int(size) // before // inside]
    order = _device_order(shape or str(math.prod(split)), transposed).reshape(split)
    together = range(1, len(split), 3)
    apart = [axis for axis in range(len(split)) if axis not in together]
    return order.transpose([*apart, *together]).reshape(-1, math.prod(split[1::3])).tolist()


def _device_order(shape: str, transposed: str | None) -> Any:
    """Return the devices in the order that `[2,4]T(1,0)` says: counted in one shape, and its axes exchanged."""
    order = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return order if transposed is None else order.transpose(_integers(transposed))


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
