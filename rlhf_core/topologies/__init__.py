"""Compile a pipeline's programs for accelerators that are not there, and say what they would need and how fast they
could be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.errors import InputError
from rlhf_core.runtime.terminal import echo, show
from rlhf_core.topologies import interpreters
from rlhf_core.topologies.judge import StageVerdict, judge
from rlhf_core.topologies.names import parse
from rlhf_core.topologies.table import as_json, heading, lines, program_table

__all__ = ["check_on"]


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
    job = {
        "on": on,
        "pipeline": str(pipeline.absolute()),
        "sets": list(sets),
        "dir": None if dir is None else str(dir.absolute()),
        "plugins": [str(file.absolute()) for file in plugins],
    }
    results = interpreters.run(interpreters.find(topology), job)
    stages = [judge(name, facts, topology, results["mesh"]) for name, facts in results["stages"].items()]
    if json_output:
        echo(json.dumps(as_json(topology, results, stages), indent=2, ensure_ascii=False))
    else:
        echo(f"\n{heading(topology, results['mesh'])}")
        for stage in stages:
            echo(f"\n{stage.name}")
            if stage.programs:
                show(program_table(stage))
            echo("\n".join(f"  {line}" for line in lines(stage)))
    problems = [_problem(stage, on) for stage in stages if not stage.fits]
    if problems:
        raise InputError(*problems)


def _problem(stage: StageVerdict, on: str) -> str:
    large = ", ".join(program.name for program in stage.programs if not program.fits)
    return f"stage '{stage.name}' does not fit {on} ({large}): {'; '.join(stage.advice)}"
