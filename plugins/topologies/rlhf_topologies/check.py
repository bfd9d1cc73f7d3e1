"""Answer `rlhf check --on`: compile a pipeline's programs for other hardware, and print what they need and how fast
they can be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import rlhf_topologies.interpreters as interpreters
from rlhf_core.errors import InputError
from rlhf_core.runtime.machine import format_bytes
from rlhf_core.runtime.terminal import echo, show
from rlhf_topologies.chips import parse

COLUMNS = ("program", "per update", "memory", "FLOPs", "bytes", "sends", "at least", "bound by")


def check_on(
    pipeline: Path,
    on: str,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[Path] = (),
    dir: Path | None = None,
    json_output: bool = False,
) -> None:
    """Compile the programs of a pipeline for devices that need not exist, and print whether and how fast they run.

    on: such as "h100:8". The rest is as for `rlhf check`. json_output: print one JSON object instead.

    Raises InputError for an unknown name, where no compiler is installed, and with what to change where a stage does
    not fit.
    """
    job = {
        "on": on,
        "pipeline": str(pipeline.absolute()),
        "sets": list(sets),
        "dir": None if dir is None else str(dir.absolute()),
        "plugins": [str(file.absolute()) for file in plugins],
    }
    found = interpreters.run(interpreters.find(parse(on)), job)
    if json_output:
        echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found)
    problems = _problems(found)
    if problems:
        raise InputError(*problems)


def _problems(found: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, stage in found["stages"].items():
        if not stage["fits"]:
            large = ", ".join(each["name"] for each in stage["programs"] if not each["fits"])
            problems.append(
                f"stage '{name}' does not fit {found['on']} ({large}): {'; '.join(stage['advice'])}"
            )
    return problems


def _print(found: Mapping[str, Any]) -> None:
    """Print what was compiled for some devices, stage by stage."""
    chip = found["chip"]
    axes = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    kernels = f"kernels of {found['kernels']}" if found["kernels"] else "no kernels: pip install rlhf-kernels"
    echo(
        f"\non {found['on']}: {found['devices']} × {format_bytes(chip['memory'])}, of which arrays may take "
        f"{format_bytes(chip['usable'])}; mesh {axes}; {kernels}. Per device:"
    )
    for name, stage in found["stages"].items():
        echo(f"\n{name}")
        if stage["programs"]:
            show(program_table(stage))
        echo("\n".join(f"  {line}" for line in lines(stage)))


def program_table(stage: Mapping[str, Any]) -> Table:
    """List the programs of a stage, a row each, and one for a step of its main loop."""
    table = _table(COLUMNS, range(1, 7))
    for each in stage["programs"]:
        calls = f"{each['calls']:.3g}" if each["calls"] else "rarely"
        if each["error"] is not None:
            table.add_row(each["name"], calls, "does not compile")
            continue
        table.add_row(each["name"], calls, _memory(each), *_work(each["call"]))
        if each["step"] is not None:
            table.add_row(f"  each of {each['steps']:,} steps", "", "", *_work(each["step"]))
    return table


def _table(columns: Sequence[str], numbers: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in numbers else "left", overflow="fold")
    return table


def _memory(each: Mapping[str, Any]) -> str:
    return format_bytes(each["peak"]) + ("" if each["fits"] else " !")


def _work(part: Mapping[str, Any]) -> tuple[str, ...]:
    by, seconds = max(part["seconds"].items(), key=lambda item: item[1])
    sent = format_bytes(part["sent"] + part["network"])
    return _number(part["flops"]), format_bytes(part["bytes"]), sent, _seconds(seconds), by


def lines(stage: Mapping[str, Any]) -> list[str]:
    """Summarize a stage: what lies in memory, what devices send, the speed at most, and whether it fits."""
    notes = [] if stage["note"] is None else [stage["note"]]
    programs = stage["programs"]
    if not programs:
        return notes
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in stage["resident"].items())
    out = [*notes, f"always in memory: {held}", *_collectives(programs)]
    brought = [f"{each['name']} {format_bytes(each['host'])}" for each in programs if each["host"]]
    if brought:
        out.append(f"from the host's memory, per call: {', '.join(brought)}")
    if not any(each["error"] for each in programs):
        out += _speeds(stage)
    largest = max(programs, key=lambda each: each["peak"])
    peak = f"{format_bytes(largest['peak'])} of {format_bytes(stage['usable'])} in {largest['name']}"
    out.append(f"fits: at most {peak}" if stage["fits"] else f"does not fit: {peak}")
    for each in programs:
        if each["error"] is not None:
            out.append(f"{each['name']}: {each['error']}")
        uncounted = {*each["call"]["uncounted"], *(each["step"] or each["call"])["uncounted"]}
        if uncounted:
            out.append(f"{each['name']}: FLOPs without those of the kernels {', '.join(sorted(uncounted))}")
    return out


def _speeds(stage: Mapping[str, Any]) -> Iterator[str]:
    """Say how fast a stage is at most, and what an update spends its time on."""
    for what, tokens in (("training", stage["training_tokens"]), ("sampling", stage["sampled_tokens"])):
        seconds = stage[f"{what}_seconds"]
        if seconds:
            mfu = _percent(stage[f"{what}_mfu"])
            yield f"{what}: at most {tokens / seconds:,.0f} tokens/s, MFU at most {mfu}"
    update = stage["update_seconds"]
    if not update:
        return
    shown = ""
    if stage["sampling_seconds"]:
        for what in ("training", "sampling"):
            shown += f", {_percent(stage[f'{what}_seconds'] / update)} {what}"
    yield f"an update takes at least {_seconds(update)}{shown}"


def _collectives(programs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say what each program's devices send each other, by kind of collective."""
    for each in programs:
        for name, part in ((each["name"], each["call"]), (f"{each['name']}, each step,", each["step"])):
            if part is not None and part["collectives"]:
                kinds = sorted(part["collectives"].items(), key=lambda item: -item[1][1])
                sizes = (f"{kind} {format_bytes(size)} in {number:,.0f}" for kind, (number, size) in kinds)
                yield f"{name} sends {', '.join(sizes)}"


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
