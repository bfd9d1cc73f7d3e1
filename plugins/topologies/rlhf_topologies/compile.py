"""Compile the programs of a pipeline's stages, in an environment that has the compiler; see `interpreters.run`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from rlhf_core import ATTENTION, installed_registry, plugins, runtime
from rlhf_core.errors import UNREADABLE, InputError
from rlhf_core.mesh import OPTIONAL, make_mesh
from rlhf_core.pipeline.file import read
from rlhf_core.pipeline.plan import plan
from rlhf_core.runtime.files import write_atomic
from rlhf_core.runtime.machine import Planned, planning_for
from rlhf_core.training.memory import device_bytes
from rlhf_topologies import hlo
from rlhf_topologies.chips import Topology, parse, target_config
from rlhf_topologies.description import Program, StagePrograms
from rlhf_topologies.programs import stage_programs
from rlhf_topologies.verdicts import judge_stage

COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")
"""Distributions whose versions decide what a program becomes."""


def main(file: str) -> None:
    """Do the job that a JSON file describes, and write its results or the problems as JSON."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))

    def save(results: Mapping[str, Any]) -> None:
        write_atomic(Path(job["results"]), json.dumps(results))

    try:
        save(compile_pipeline(job, say=partial(print, flush=True)))
    except InputError as error:
        save({"problems": list(error.problems)})


def compile_pipeline(
    job: Mapping[str, Any], *, devices: list[Any] | None = None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Compile every program of a pipeline; return what `rlhf check --on … --json` prints.

    job: `on`, the devices' name; `pipeline`, `sets`, `dir` and `plugins` as `rlhf check` takes them. devices: others
    than `on` names, for tests.

    Raises InputError with every problem of the pipeline.
    """
    topology = parse(job["on"])
    cache = FactsCache(topology)
    stages = {}
    with planned_devices(topology):
        host = plugins.load(files=[Path(file) for file in job["plugins"]])
        planned = plan(read(job["pipeline"], sets=job["sets"], dir=job["dir"]), host)
        mesh = make_mesh(**planned.mesh, devices=find_devices(topology) if devices is None else devices)
        described = stage_programs(planned, host, mesh)
        for stage in planned.stages:
            facts, programs = None, described[stage.name]
            if programs is not None:
                compiled = partial(cache.compiled, stage=stage.name, say=say)
                facts = compile_stage(programs, compiled)
                facts["remat"] = stage.preview.remat
            stages[stage.name] = judge_stage(facts, topology, mesh.shape)
    return describe(topology, mesh.shape, cache.versions, stages)


def describe(
    topology: Topology, mesh: Mapping[str, int], compiler: Mapping[str, str], stages: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the devices, their mesh, compiler and kernels, and the verdicts on stages, as `--json` prints them."""
    chip = topology.chip
    return {
        "on": topology.name,
        "devices": topology.count,
        "chip": {
            "usable": chip.usable,
            **{key: value for key, value in asdict(chip).items() if key not in ("platform", "target")},
        },
        "mesh": {axis: size for axis, size in mesh.items() if size > 1 or axis not in OPTIONAL},
        "compiler": dict(compiler),
        "kernels": installed_kernels(),
        "stages": dict(stages),
    }


def installed_kernels() -> str | None:
    """Name the distribution whose kernels are in the programs, and its version; None: they are computed without."""
    registry = installed_registry()
    if "pallas" not in registry.names(ATTENTION):
        return None
    return registry.owner(ATTENTION, "pallas")


def planned_devices(topology: Topology) -> AbstractContextManager[None]:
    """Make programs for these devices rather than for those of this process."""
    return planning_for(Planned(topology.chip.platform, topology.count, topology.chip.usable))


def find_devices(topology: Topology) -> list[Any]:
    """Return the devices that the compiler makes programs for. Raises InputError for a shape that it does not know."""
    chip = topology.chip
    shape = "x".join(map(str, topology.shape))
    try:
        if chip.platform == "tpu":
            described = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.name}:{shape}")
        else:
            described = topologies.get_topology_desc(
                platform="cuda", topology_name="", target_config=target_config(chip), topology=shape
            )
    except Exception as error:  # of the compiler's own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"--on {topology.name}: the compiler does not know these devices: {reason}"
        ) from error
    return list(described.devices)


def compile_stage(described: StagePrograms, compiled: Callable[[Program], dict[str, Any]]) -> dict[str, Any]:
    """Collect what `judge_stage` needs of a stage's programs.

    compiled: compiles a program, and returns its `program_facts`.
    """
    resident = {key: device_bytes(tree) for key, tree in described.resident.items()}
    programs = []
    for program in described.programs:
        facts = {
            "name": program.name,
            "work": program.work,
            "rows": program.rows,
            "calls": program.calls,
            "tokens": program.tokens,
            "steps": program.steps,
            "host": program.host,
            "beside": sum(resident.values()) - sum(resident.get(key, 0) for key in program.reads),
            **compiled(program),
        }
        programs.append(facts)
    return {
        "note": described.note,
        "resident": resident,
        "weights": described.weights,
        "programs": programs,
    }


class FactsCache:
    """Facts about compiled programs, kept under the suite's cache by program, compiler and devices."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.directory = runtime.cache_root() / "compiled"
        self.versions = {}
        for name in COMPILERS:
            with suppress(metadata.PackageNotFoundError):
                self.versions[name] = metadata.version(name)
        chip = topology.chip
        described = target_config(chip) if chip.platform == "gpu" else chip.name
        arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
        self._compiler = json.dumps([self.versions, topology.name, described, hlo.VERSION, arguments])

    def compiled(self, program: Program, *, stage: str, say: Callable[[str], None]) -> dict[str, Any]:
        """Return a program's memory and counts, compiled now or before; or why it cannot be compiled."""
        lowered = program.lower()
        key = hashlib.sha256(f"{self._compiler}\0{lowered.as_text()}".encode()).hexdigest()
        file = self.directory / f"{key}.json"
        try:
            facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return facts
        except UNREADABLE:
            say(f"compiling {stage}: {program.name}")
        try:
            facts = program_facts(lowered.compile(), self.topology, decodes=program.steps > 0)
        except jax.errors.JaxRuntimeError as error:
            return {"error": " ".join(str(error).split())[:600]}
        with suppress(OSError):  # not writable: compile every time
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(facts))
        return facts


def program_facts(compiled: Any, topology: Topology, *, decodes: bool = True) -> dict[str, Any]:
    """Return a compiled program's memory, bytes per device, and what it does.

    decodes: whether its loops without a known number of rounds decode tokens; others, which exchange tokens among
    experts, have one round where the router is balanced.
    """
    memory = compiled.memory_analysis()
    once, loops = hlo.count_apart(compiled.as_text(), topology.machine, trips=None if decodes else 1.0)
    return {
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
        },
        "once": asdict(once),
        "loops": [asdict(loop) for loop in loops],
    }
