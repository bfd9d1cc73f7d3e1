"""Judge compiled programs: whether a stage fits its devices, how fast it can be at most, and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhf_core.mesh import ROW_AXES
from rlhf_core.runtime.machine import format_bytes
from rlhf_topologies.chips import Topology
from rlhf_topologies.hlo import Counts
from rlhf_topologies.roofline import Bound, bound

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""In the message of a compiler that refuses a program for its memory, as the TPU's does."""
FORWARD, TRAINING = 2, 6
"""Operations per parameter and token of a forward pass, and of one with its backward pass."""


def judge_stage(
    stage: Mapping[str, Any] | None, topology: Topology, mesh: Mapping[str, int]
) -> dict[str, Any]:
    """Judge a stage from what `compile_stage` returned of it; None: its trainer has no build.

    Returns, as `--json` prints it: "fits"; "note": what was not compiled, and why; "resident": {what: bytes per device
    during the whole stage}; "usable": bytes per device; "update_seconds", at least; "training_tokens" and
    "sampled_tokens" per update; "training_mfu" and "sampling_mfu": FLOPs that the model needs over those that the
    devices could do in the time, at most; "programs", see `judge_program`; "advice": what to change where something
    does not fit.
    """
    if stage is None:
        note = "not compiled: its trainer has no build"
        stage = {"note": note, "resident": {}, "weights": 0, "programs": [], "remat": None}
    programs = [judge_program(facts, topology) for facts in stage["programs"]]

    def total(number: str, *works: str) -> float:
        return sum(
            (each["calls"] * each[number] for each in programs if not works or each["work"] in works), 0.0
        )

    peak = topology.count * max(topology.chip.flops.values())
    found = {
        "fits": all(each["fits"] for each in programs),
        "note": stage["note"],
        "resident": dict(stage["resident"]),
        "usable": topology.chip.usable,
        "training_tokens": total("tokens", "train"),
        "sampled_tokens": total("tokens", "sample"),
        "training_seconds": total("seconds", "train", "update"),
        "sampling_seconds": total("seconds", "sample"),
        "update_seconds": total("seconds"),
    }
    for mfu, operations, tokens, seconds in (
        ("training_mfu", TRAINING, "training_tokens", "training_seconds"),
        ("sampling_mfu", FORWARD, "sampled_tokens", "sampling_seconds"),
    ):
        needed = stage["weights"] * operations * found[tokens]
        found[mfu] = needed / (found[seconds] * peak) if found[seconds] else 0.0
    advice = advise(programs, stage["resident"], topology, mesh, remat=stage["remat"])
    return {**found, "programs": programs, "advice": advice}


def judge_program(facts: Mapping[str, Any], topology: Topology) -> dict[str, Any]:
    """Judge a program on one device from its facts.

    Returns "peak": bytes in memory while it runs, and "memory": their parts; "host": bytes that a call gets from the
    host's memory; "call": what a call does outside its main loop, and "step": a round of that loop; None: it has none;
    "seconds" per call, at least, and "bound": what sets them; "error": why it could not be compiled. The rest is as in
    the facts.
    """
    chip = topology.chip
    named = {key: facts[key] for key in ("name", "work", "calls", "tokens", "steps", "rows", "host")}
    once = Counts(**facts.get("once", {}))
    step = None
    if facts.get("loops") and facts["steps"]:
        # Decoding, rather than what fills slots: the loop that moves most.
        step = max((Counts(**loop) for loop in facts["loops"]), key=lambda loop: loop.bytes)
    calls = bound(once, chip, facts["host"])
    steps = Bound() if step is None else bound(step, chip)
    in_steps = facts["steps"] * steps.seconds
    memory = {}
    if "error" not in facts:
        taken = facts["memory"]
        memory = {
            "arguments": taken["arguments"],
            "temporary": taken["temporary"],
            "outputs": taken["outputs"] - taken["aliased"],
            "beside": facts["beside"],
        }
    peak = sum(memory.values())
    return {
        **named,
        "peak": peak,
        "fits": "error" not in facts and peak <= chip.usable,
        "memory": memory,
        "seconds": calls.seconds + in_steps,
        "bound": (steps if in_steps > calls.seconds else calls).by,
        "call": {**asdict(once), "flops": once.flops, "seconds": asdict(calls)},
        "step": None if step is None else {**asdict(step), "flops": step.flops, "seconds": asdict(steps)},
        "error": facts.get("error"),
    }


def _spread_state(topology: Topology, mesh: Mapping[str, int]) -> str:
    """Say how a state that takes most of a device becomes smaller there."""
    kept = mesh["tensor"] * mesh.get("context", 1) * mesh.get("expert", 1)
    if mesh["fsdp"] * kept < topology.count:
        return f"set mesh = {{ fsdp = {topology.count // kept} }}"
    return "use more devices, or train adapters with lora = { rank = 16 }"


def _smaller_batches(rows: Sequence[int | None], mesh: Mapping[str, int], remat: str | None) -> list[str]:
    """Say what makes micro-batches of that many rows smaller, most effective first."""
    one_each = all(count is not None and count <= _spread(mesh) for count in rows)
    fewer_rows = "cut rows over devices, since each has one row already (mesh.context)"
    return [
        *([] if remat == "full" else ['set remat = "full"']),
        fewer_rows if one_each else "raise gradient_accumulation_steps",
        "shorten rows (max_sequence_length, or max_completion_length and num_generations)",
    ]


def _spread(mesh: Mapping[str, int]) -> int:
    """Count the devices that rows are spread over."""
    return math.prod(mesh.get(axis, 1) for axis in ROW_AXES)


def advise(
    programs: Sequence[Mapping[str, Any]],
    resident: Mapping[str, int],
    topology: Topology,
    mesh: Mapping[str, int],
    *,
    remat: str | None,
) -> list[str]:
    """Say what to change, most effective first, where programs do not fit. remat: the stage's setting."""
    lines, large = [], []
    for each in programs:
        if each["fits"]:
            continue
        if each["error"] and OUT_OF_MEMORY not in each["error"]:
            lines.append(f"{each['name']}: the compiler says: {each['error']}")
        else:
            large.append(each)
    if not large:
        return lines
    usable = topology.chip.usable
    held = sum(resident.values())
    if held > usable / 2:
        lines.append(
            f"{format_bytes(held)} of {format_bytes(usable)} are the stage's {', '.join(resident)}: "
            + _spread_state(topology, mesh)
        )
    works = {each["work"] for each in large}
    if "train" in works:
        rows = [each["rows"] for each in large if each["work"] == "train"]
        lines.append("for micro-batches: " + ", then ".join(_smaller_batches(rows, mesh, remat)))
    if "sample" in works:
        lines.append(
            "for sampling: more devices that share each layer (sampling.mesh.tensor), a shorter "
            "max_completion_length or max_prompt_length"
        )
    if "read" in works:
        lines.append("for reading: shorter rows (max_completion_length, max_prompt_length, num_generations)")
    if "update" in works and held <= usable / 2:
        lines.append("for the update: spread the state with mesh.fsdp")
    return lines
