"""Compile a pipeline's programs for accelerators that are not there, and say what they would need and how fast they
could be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_core.errors import InputError
from rlhf_core.runtime.peak_memory import format_bytes
from rlhf_core.runtime.terminal import echo, show
from rlhf_topologies import interpreters
from rlhf_topologies.names import Topology, machines, parse
from rlhf_topologies.table import as_json, candidate_table, heading, lines, program_table
from rlhf_topologies.verdicts import StageVerdict, judge_stage

SEARCH = 600
"""Seconds that a search for settings takes at most."""


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

    on: such as "h100:8"; the rest is as for `rlhf check`. json_output: print one JSON object instead.

    Raises InputError for an unknown name, where no compiler is installed, and with what to change where a stage does
    not fit.
    """
    topology = parse(on)
    results = interpreters.run(interpreters.find(topology), _job(pipeline, on, sets, plugins, dir))
    stages = _verdicts(results, topology)
    if json_output:
        _print_json(as_json(topology, results, stages))
    else:
        _print(topology, results, stages)
    problems = [_problem(stage, on) for stage in stages if not stage.fits]
    if problems:
        raise InputError(*problems)


def suggest_on(
    pipeline: Path,
    on: str,
    *,
    sets: Sequence[str] = (),
    plugins: Sequence[Path] = (),
    dir: Path | None = None,
    json_output: bool = False,
) -> None:
    """Search for a mesh and settings with which a pipeline fits devices; print them, and what their compiler says.

    on: such as "h100:8", or a chip alone for the fewest devices of one machine. The rest is as for `check_on`.

    Raises InputError as it does, and where nothing fits.
    """
    job = {**_job(pipeline, on, sets, plugins, dir), "suggest": SEARCH}
    found = interpreters.run(interpreters.find(machines(on)[0]), job, seconds=SEARCH)
    compiled = []
    for each in found["compiled"]:
        topology = parse(each["on"])
        compiled.append((each, topology, _verdicts(each, topology)))
    if json_output:
        judged = [
            {"candidate": each["candidate"], **as_json(topology, each, v)} for each, topology, v in compiled
        ]
        _print_json({**found, "compiled": judged})
    else:
        echo(f"\nby arithmetic, on {on}:")
        show(candidate_table(found["ranked"]))
        for each, topology, verdicts in compiled:
            _print(topology, each, verdicts)
    if not found["lines"] and compiled:
        each, topology, verdicts = compiled[-1]
        problems = [_problem(verdict, topology.name) for verdict in verdicts if not verdict.fits]
        raise InputError(
            f"--on {on}: none fits of the {len(compiled)} that were compiled; of the last, {problems[0]}"
        )
    if not found["lines"]:
        raise InputError(_nothing_fits(on, found["ranked"]))
    if not json_output:
        fit = "these fit" if found["chosen"] else "time ran out; by arithmetic alone these fit"
        where = (found["chosen"] or next(each for each in found["ranked"] if each["fits"]))["on"]
        echo("\n".join([f"\n{fit} {where}; for the pipeline:", "", *found["lines"]]))


def _nothing_fits(on: str, ranked: Sequence[Mapping[str, Any]]) -> str:
    least = min(ranked, key=lambda each: each["peak"])
    name, stage = max(least["stages"].items(), key=lambda item: max(item[1]["programs"].values(), default=0))
    return (
        f"--on {on}: nothing fits. On {least['on']} the smallest takes {format_bytes(least['peak'])} of "
        f"{format_bytes(parse(least['on']).chip.usable)} per device, and stage '{name}' keeps "
        f"{format_bytes(stage['resident'])} all the time: use more devices or shorter rows, or train adapters with "
        "lora = { rank = 16 }"
    )


def _job(
    pipeline: Path, on: str, sets: Sequence[str], plugins: Sequence[Path], dir: Path | None
) -> dict[str, Any]:
    return {
        "on": on,
        "pipeline": str(pipeline.absolute()),
        "sets": list(sets),
        "dir": None if dir is None else str(dir.absolute()),
        "plugins": [str(file.absolute()) for file in plugins],
    }


def _verdicts(results: Mapping[str, Any], topology: Topology) -> list[StageVerdict]:
    return [judge_stage(name, facts, topology, results["mesh"]) for name, facts in results["stages"].items()]


def _print(topology: Topology, results: Mapping[str, Any], stages: Sequence[StageVerdict]) -> None:
    echo(f"\n{heading(topology, results['mesh'])}")
    for stage in stages:
        echo(f"\n{stage.name}")
        if stage.programs:
            show(program_table(stage))
        echo("\n".join(f"  {line}" for line in lines(stage)))


def _print_json(found: Mapping[str, Any]) -> None:
    echo(json.dumps(found, indent=2, ensure_ascii=False))


def _problem(stage: StageVerdict, on: str) -> str:
    large = ", ".join(program.name for program in stage.programs if not program.fits)
    return f"stage '{stage.name}' does not fit {on} ({large}): {'; '.join(stage.advice)}"
