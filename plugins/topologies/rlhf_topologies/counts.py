"""What a compiled program does, counted in its HLO text: products, bytes, and what devices send each other.

XLA's own count (`compiled.cost_analysis()`) takes the body of every loop once, and is empty for GPUs. Here a body
counts as often as the loop runs, by `known_trip_count`; loops whose number of rounds depends on data are counted by
themselves.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_topologies.hlo import (
    CALLED,
    FAST_MEMORY,
    Instruction,
    arrays,
    called_by,
    device_groups,
    parse,
    shape_bytes,
    tuple_index,
    unwrapped,
)

VERSION = 3
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
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
TARGET = re.compile(r'custom_call_target="([^"]*)"')
COST = re.compile(r'"(flops|bytes_accessed)": ?"(\d+)"')


@dataclass
class Counts:
    """Of one device.

    products: {dtype of the factors: operations, two per multiplication and addition}. bytes: see `count`.
    collectives: {kind: [how many, bytes]}, of each the larger of what it takes and gives.
    sent: bytes that the device sends at least, to others of its machine; network: to other machines.
    uncounted: calls that may hide products.
    """

    products: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes: float = 0.0
    collectives: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    sent: float = 0.0
    network: float = 0.0
    uncounted: set[str] = field(default_factory=set)

    @property
    def flops(self) -> float:
        return sum(self.products.values())

    def add(self, other: Counts, times: float = 1.0) -> None:
        """Add another count `times` times."""
        for dtype, flops in other.products.items():
            self.products[dtype] += times * flops
        for kind, (number, size) in other.collectives.items():
            self.collectives[kind][0] += times * number
            self.collectives[kind][1] += times * size
        self.bytes += times * other.bytes
        self.sent += times * other.sent
        self.network += times * other.network
        self.uncounted |= other.uncounted

    def to_dict(self) -> dict[str, Any]:
        """Return the count as JSON has it."""
        return {
            "products": dict(self.products),
            "bytes": self.bytes,
            "collectives": {kind: list(pair) for kind, pair in self.collectives.items()},
            "sent": self.sent,
            "network": self.network,
            "uncounted": sorted(self.uncounted),
        }

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Counts:
        """Invert `to_dict`."""
        counts = cls(bytes=kept["bytes"], sent=kept["sent"], network=kept["network"])
        counts.products.update(kept["products"])
        counts.collectives.update({kind: list(pair) for kind, pair in kept["collectives"].items()})
        counts.uncounted |= set(kept["uncounted"])
        return counts


def count(text: str, trips: float = 1.0) -> Counts:
    """Count what one run of a program does; text: `compiled.as_text()`.

    products: of `dot` and of what TPUs and GPUs make of it. bytes: what every instruction reads and writes as if
    nothing stayed in a cache; of slices and gathers the part that is touched. trips: how often a loop runs whose number
    of rounds depends on data. Of a condition's branches the one with most products and bytes counts.

    Raises ValueError for instructions that may hide products.
    """
    reader = _Reader(text, trips)
    total = reader.of(reader.entry)
    if total.uncounted:
        raise ValueError(f"products that are not counted: {', '.join(sorted(total.uncounted))}")
    return total


def count_apart(text: str, machine: int | None = None) -> tuple[Counts, list[Counts]]:
    """Count what one run of a program does outside of loops whose number of rounds depends on data, and a round of each
    such loop that no other one contains; nothing of those within them.

    machine: devices of each machine; None: all are in one. Partitions are numbered machine by machine.
    """
    reader = _Reader(text, None, machine)
    return reader.of(reader.entry), [reader.of(body) for body in reader.outer_loops()]


class _Reader:
    """Counts the computations of a program, each once."""

    def __init__(self, text: str, trips: float | None, machine: int | None = None) -> None:
        """trips: rounds of loops that do not say it; None: do not count these."""
        self.computations, self.entry = parse(text)
        self.trips, self.machine = trips, machine
        partitions = re.search(r"num_partitions=(\d+)", text[:20_000])
        self.devices = int(partitions[1]) if partitions else 1
        self._done: dict[str, Counts] = {}
        self._loops: dict[str, list[str]] = defaultdict(list)  # computation → bodies of loops within it

    def of(self, name: str) -> Counts:
        if name not in self._done:
            self._done[name] = total = Counts()
            inside = self.computations[name]
            for each in inside.values():
                total.add(self._one(name, each, inside))
        return self._done[name]

    def outer_loops(self) -> list[str]:
        """Return the bodies of loops without a known number of rounds that none of them contains."""
        self.of(self.entry)
        return self._loops_of(self.entry)

    def _loops_of(self, name: str) -> list[str]:
        bodies = list(self._loops[name])
        for each in self.computations[name].values():
            if each.opcode == "while" and self._rounds(each, self.computations[name]) is None:
                continue
            for called in called_by(each) if each.opcode in ("while", "call", "conditional") else ():
                bodies += self._loops_of(called)
        return bodies

    def _rounds(self, loop: Instruction, inside: Mapping[str, Instruction]) -> float | None:
        """Return how often a loop runs: what XLA says of it, else by a counter from one constant to another in constant
        steps; None where it depends on data.
        """
        if known := TRIPS.search(loop.attributes):
            return float(known[1])
        condition = self.computations[re.findall(r"condition=%?([\w.-]+)", loop.attributes)[0]]
        body = self.computations[CALLED.findall(loop.attributes)[0]]
        test, following = (next(one for one in c.values() if one.is_root) for c in (condition, body))
        state = inside[loop.operands[0]]
        if "direction=LT" not in test.attributes or {state.opcode, following.opcode} != {"tuple"}:
            return None

        def value(name: str, computation: Mapping[str, Instruction]) -> int | None:
            """Return a constant, or what the loop begins with in an element of its state."""
            found = unwrapped(name, computation)
            if found.opcode == "get-tuple-element" and computation is not inside:
                return value(state.operands[tuple_index(found)], inside)
            return int(found.operands[0]) if found.opcode == "constant" else None

        counter = unwrapped(test.operands[0], condition)
        if counter.opcode != "get-tuple-element":
            return None
        step = unwrapped(following.operands[tuple_index(counter)], body)
        begin, end = (value(name, condition) for name in test.operands)
        by = value(step.operands[-1], body) if step.opcode == "add" else None
        return None if begin is None or end is None or not by else float(math.ceil((end - begin) / by))

    def _one(self, computation: str, each: Instruction, inside: Mapping[str, Instruction]) -> Counts:
        """Count one instruction with what it calls."""
        total = Counts()
        called = called_by(each)
        if each.opcode == "while":
            body = CALLED.findall(each.attributes)[0]
            known = self._rounds(each, inside)
            if known is None:
                self._loops[computation].append(body)
            rounds = self.trips if known is None else known
            if rounds:
                total.add(self.of(body), rounds)
        elif each.opcode in ("call", "async-start"):
            for name in called:
                total.add(self.of(name))
        elif each.opcode == "conditional":
            total.add(max(map(self.of, called), key=lambda branch: (branch.flops, branch.bytes)))
        elif each.opcode == "fusion":
            body = self.computations[called[0]]
            total.add(self.of(called[0]))
            if called[0].startswith(
                "all-reduce-scatter"
            ):  # on TPUs one operation, which each device gets a part of
                total = _as_reduce_scatter(total)
            total.bytes = _fusion_bytes(each, inside, body)
        elif each.opcode == "dot":
            total.products[_factor_dtype(each, inside)] += _dot_flops(each, inside)
        elif each.opcode == "convolution":
            total.products[_factor_dtype(each, inside)] += _convolution_flops(each, inside)
        elif each.opcode == "custom-call":
            _count_call(each, inside, total)
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            self._send(kind, each, inside, total)
        if each.opcode not in FREE and not each.opcode.endswith(ENDED):
            total.bytes += _bytes(each, inside)
        return total

    def _send(self, kind: str, each: Instruction, inside: Mapping[str, Instruction], total: Counts) -> None:
        """Count a collective, and what the best algorithm sends for it over each kind of wire."""
        size = _collective_bytes(each, inside)
        total.collectives[kind] = [1.0, size]
        groups = device_groups(each.attributes, self.devices)
        members = max(map(len, groups), default=1)
        machine = self.machine or self.devices
        spread = [len({device // machine for device in group}) for group in groups]
        machines = max(spread, default=1)
        passes = 2 if kind == "all-reduce" else 1
        if kind in ("collective-permute", "collective-broadcast"):
            total.network, total.sent = (size, 0.0) if machines > 1 else (0.0, size)
            return
        total.sent = passes * size * (members - 1) / members
        if machines > 1:
            # Each machine has to get the parts of the others, through the network ports of all members in it.
            beside = members / machines
            total.network = (
                passes * size * (machines - 1) / machines / (1 if "all-to-all" in kind else beside)
            )


def _as_reduce_scatter(counts: Counts) -> Counts:
    """Count an all-reduce whose result is scattered at once: half of it is sent."""
    scattered = Counts(counts.products, counts.bytes, sent=counts.sent / 2, network=counts.network / 2)
    scattered.collectives["reduce-scatter"] = counts.collectives.get("all-reduce", [0.0, 0.0])
    return scattered


def _count_call(each: Instruction, inside: Mapping[str, Instruction], total: Counts) -> None:
    """Count the products of a kernel: those that it states; of cuDNN's attention two forward and five backward."""
    found = TARGET.search(each.attributes)
    target = found[1] if found else ""
    if stated := _stated_cost(each):
        largest = max(each.operands, key=lambda name: shape_bytes(inside[name].shape))
        total.products[next(arrays(inside[largest].shape))[0]] += stated.get("flops", 0.0)
    elif "fmha" in target:
        (dtype, query), (_, key), *_ = (next(arrays(inside[name].shape)) for name in each.operands[:2])
        products = 5 if "Backward" in target else 2
        total.products[dtype] += products * 2.0 * math.prod(query) * key[1]
    elif re.search(r"conv|matmul|gemm|\bdot\b|triton|tpu_custom_call|mosaic", target):
        total.uncounted.add(target)


def _stated_cost(each: Instruction) -> dict[str, float]:
    """Return the `flops` and `bytes_accessed` that a Pallas kernel states: on TPUs its cost estimate, on GPUs, which
    drop that, its metadata. Empty for all others.
    """
    attributes = each.attributes.replace("\\22", '"') if each.opcode == "custom-call" else ""
    return {name: float(number) for name, number in COST.findall(attributes)}


def _traffic(shape: str) -> float:
    return shape_bytes(shape, main_memory=True)


def _operand_bytes(each: Instruction, inside: Mapping[str, Instruction]) -> list[float]:
    return [_traffic(inside[name].shape) for name in each.operands if name in inside]


def _factor_dtype(each: Instruction, inside: Mapping[str, Instruction]) -> str:
    return next(arrays(inside[each.operands[0]].shape))[0]


def _dot_flops(each: Instruction, inside: Mapping[str, Instruction]) -> float:
    (_, left), *_ = arrays(inside[each.operands[0]].shape)
    (_, out), *_ = arrays(each.shape)
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
    contracted = [int(axis) for axis in match[1].split(",") if axis] if match else []
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _convolution_flops(each: Instruction, inside: Mapping[str, Instruction]) -> float:
    """Count the products of a convolution, which TPUs make of every `dot`, without those with padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.attributes)
    assert labels is not None
    left, right, out = (
        dict(zip(names, sizes, strict=True))
        for names, (_, sizes) in zip(
            labels.groups(),
            (
                next(arrays(inside[each.operands[0]].shape)),
                next(arrays(inside[each.operands[1]].shape)),
                next(arrays(each.shape)),
            ),
            strict=True,
        )
    )
    window = re.search(r"window=\{([^}]*)\}", each.attributes)
    options = dict(part.split("=") for part in window[1].split()) if window else {}
    flops = 2.0 * out["b"] * out["f"] * right["i"]
    for at, axis in enumerate(sorted(name for name in out if name.isdigit())):

        def option(name: str, default: str, at: int = at) -> str:
            return options[name].split("x")[at] if name in options else default

        low = int(option("pad", "0_0").split("_")[0])
        flops *= _positions(
            left[axis],
            right[axis],
            out[axis],
            stride=int(option("stride", "1")),
            low=low,
            left_dilation=int(option("lhs_dilate", "1")),
            right_dilation=int(option("rhs_dilate", "1")),
        )
    batches = re.search(r"batch_group_count=(\d+)", each.attributes)
    return flops * (left["b"] / out["b"] / int(batches[1]) if batches else 1)


def _positions(
    left: int, right: int, out: int, *, stride: int, low: int, left_dilation: int, right_dilation: int
) -> int:
    """Count the pairs of output and window positions that meet an element of the left factor."""
    at = np.arange(out)[:, None] * stride - low + np.arange(right) * right_dilation
    return int(((at >= 0) & (at % left_dilation == 0) & (at // left_dilation < left)).sum())


def _collective_bytes(each: Instruction, inside: Mapping[str, Instruction]) -> float:
    taken = sum(shape_bytes(inside[name].shape) for name in each.operands if name in inside)
    given = shape_bytes(each.shape)
    # An asynchronous start gives what it took beside the result, or only that.
    return max(taken, given - taken if each.opcode.endswith("-start") else given)


def _bytes(each: Instruction, inside: Mapping[str, Instruction]) -> float:
    if (stated := _stated_cost(each).get("bytes_accessed")) is not None:
        return stated
    taken, given = _operand_bytes(each, inside), _traffic(each.shape)
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
    """Count what a fusion reads of its operands, and writes."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for one in body.values():
        for name in one.operands:
            users[name].append(one)
    (root,) = (one for one in body.values() if one.is_root)
    while root.opcode == "bitcast":
        root = body[root.operands[0]]
    total, in_place = _traffic(each.shape), ""
    if root.opcode == "dynamic-update-slice":
        total, in_place = _traffic(body[root.operands[1]].shape), _source(root.operands[0], body)
    # Within the body layouts may lack what the caller's have.
    outside = {
        one.name: inside[each.operands[number]].shape
        for one in body.values()
        if one.opcode == "parameter"
        for number in [int(one.operands[0])]
        if number < len(each.operands) and each.operands[number] in inside
    }
    for name, shape in outside.items():
        reading = users[name]
        if name == in_place:
            total += _traffic(body[root.operands[1]].shape)
        elif FAST_MEMORY in shape:
            continue
        elif reading and all(
            user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name
            for user in reading
        ):
            total += sum(_traffic(user.shape) for user in reading)
        else:
            total += _traffic(shape)
    return total


def _source(name: str, body: Mapping[str, Instruction]) -> str:
    while body[name].opcode == "bitcast":
        name = body[name].operands[0]
    return name
