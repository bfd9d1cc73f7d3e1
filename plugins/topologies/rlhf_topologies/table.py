"""Print verdicts for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from rlhf_core.runtime.peak_memory import format_bytes
from rlhf_topologies.counts import Counts
from rlhf_topologies.names import Topology
from rlhf_topologies.roofline import Bound
from rlhf_topologies.verdicts import StageVerdict, Verdict

COLUMNS = ("program", "per update", "memory", "FLOPs", "bytes", "sends", "at least", "bound by")


def heading(topology: Topology, mesh: Mapping[str, int]) -> str:
    """Describe the devices in one line."""
    chip, axes = topology.chip, ", ".join(f"{axis} {size}" for axis, size in mesh.items())
    return (
        f"on {topology.name}: {topology.count} × {format_bytes(chip.memory)}, of which arrays may take "
        f"{format_bytes(chip.usable)}; mesh {axes}. Per device:"
    )


def program_table(stage: StageVerdict) -> Table:
    """List the programs of a stage, a row each, and one for a step of its main loop."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if 0 < number < 7 else "left", overflow="fold")
    for program in stage.programs:
        for row in _rows(program):
            table.add_row(*row)
    return table


def _rows(program: Verdict) -> Iterator[Sequence[str]]:
    if program.error is not None:
        yield program.name, _calls(program.calls), "does not compile"
        return
    memory = format_bytes(program.peak) + ("" if program.fits else " !")
    yield (
        program.name,
        _calls(program.calls),
        memory,
        *_work(program.once, program.once_bound),
    )
    if program.step is not None:
        yield f"  each of {program.steps:,} steps", "", "", *_work(program.step, program.step_bound)


def _work(counts: Counts, bound: Bound) -> tuple[str, ...]:
    return (
        _number(counts.flops),
        format_bytes(counts.bytes),
        format_bytes(counts.sent + counts.network),
        _seconds(bound.seconds),
        bound.by,
    )


def lines(stage: StageVerdict) -> list[str]:
    """Summarize a stage: what lies in memory, what devices send, the speed at most, and whether it fits."""
    notes = [] if stage.note is None else [stage.note]
    if not stage.programs:
        return notes
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in stage.resident.items())
    refused = any(program.error for program in stage.programs)
    out = [*notes, f"in memory all the time: {held}"]
    out += [f"{name} sends {text}" for name, text in _collectives(stage.programs)]
    for what, tokens, seconds, mfu in (
        ("training", stage.training_tokens, stage.training_seconds, stage.training_mfu),
        ("sampling", stage.sampled_tokens, stage.sampling_seconds, stage.sampling_mfu),
    ):
        if seconds and not refused:
            out.append(f"{what}: at most {tokens / seconds:,.0f} tokens/s, MFU at most {_percent(mfu)}")
    if stage.update_seconds and not refused:
        out.append(f"an update takes at least {_seconds(stage.update_seconds)}{_shares(stage)}")
    largest = max(stage.programs, key=lambda program: program.peak, default=None)
    if largest is not None:
        peak = f"{format_bytes(largest.peak)} of {format_bytes(stage.usable)} in {largest.name}"
        out.append(f"fits: at most {peak}" if stage.fits else f"does not fit: {peak}")
    for program in stage.programs:
        if program.error is not None:
            out.append(f"{program.name}: {program.error}")
        uncounted = sorted(program.once.uncounted | (program.step.uncounted if program.step else set()))
        if uncounted:
            out.append(f"{program.name}: FLOPs without those of the kernels {', '.join(uncounted)}")
    return out


def _shares(stage: StageVerdict) -> str:
    parts = (("training", stage.training_seconds), ("sampling", stage.sampling_seconds))
    if not stage.sampling_seconds:
        return ""
    listed = ", ".join(f"{_percent(seconds / stage.update_seconds)} {what}" for what, seconds in parts)
    return f", {listed}"


def _collectives(programs: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    """List what each program's devices send each other, by kind of collective."""
    for program in programs:
        for name, counts in ((program.name, program.once), (f"{program.name}, each step,", program.step)):
            if counts is None or not counts.collectives:
                continue
            kinds = sorted(counts.collectives.items(), key=lambda item: -item[1][1])
            yield (
                name,
                ", ".join(f"{kind} {format_bytes(size)} in {number:,.0f}" for kind, (number, size) in kinds),
            )


def _calls(calls: float) -> str:
    return f"{calls:.3g}" if calls else "rarely"


def _number(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {unit}".rstrip()
        value /= 1000
    return f"{value:,.3g} P"


def _seconds(value: float) -> str:
    if value >= 0.9995:
        return f"{value:,.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} µs"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def as_json(topology: Topology, results: Mapping[str, Any], stages: Sequence[StageVerdict]) -> dict[str, Any]:
    """Return what was found as data."""
    chip = topology.chip
    return {
        "on": topology.name,
        "devices": topology.count,
        "chip": {
            name: getattr(chip, name)
            for name in ("name", "memory", "usable", "memory_bandwidth", "link", "network")
        }
        | {"flops": dict(chip.flops), "sources": dict(chip.sources)},
        "mesh": results["mesh"],
        "compiler": results["compiler"],
        "stages": {stage.name: stage.to_dict() for stage in stages},
    }


def candidate_table(candidates: Sequence[Mapping[str, Any]], most: int = 8) -> Table:
    """List what `--suggest` ranked, best first, a row each."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(("devices", "mesh", "settings", "memory", "an update")):
        table.add_column(column, justify="right" if number > 2 else "left", overflow="fold")
    for each in candidates[:most]:
        settings = "; ".join(
            f"{stage}: {', '.join(f'{key} {value}' for key, value in chosen.items())}"
            for stage, chosen in each["settings"].items()
            if chosen
        )
        memory = format_bytes(each["peak"]) + ("" if each["fits"] else " !")
        mesh = ", ".join(f"{axis} {size}" for axis, size in each["mesh"].items())
        table.add_row(each["on"], mesh, settings, memory, _seconds(each["seconds"]))
    return table
