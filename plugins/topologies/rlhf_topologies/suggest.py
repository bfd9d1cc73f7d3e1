"""Find a mesh, remat, micro-batches and a sampling mesh that fit: ranked by arithmetic, the best of them compiled.

Shapes give the bytes of a stage's state exactly, `pass_memory.pass_bytes` estimates what programs need besides,
and `roofline.expected` their time. Where the compiler counts more, its ratio corrects the estimates from then on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core import plugins
from rlhf_core.config.toml import to_value
from rlhf_core.errors import InputError
from rlhf_core.mesh import ROW_AXES, make_mesh
from rlhf_core.models.experts import expert_count
from rlhf_core.pipeline.file import PipelineFile, read
from rlhf_core.pipeline.plan import plan
from rlhf_core.training.memory import device_bytes
from rlhf_topologies.chips import Topology, machines
from rlhf_topologies.compile import compile_pipeline, find_devices, planned_devices
from rlhf_topologies.description import Program, StagePrograms
from rlhf_topologies.pass_memory import pass_bytes
from rlhf_topologies.programs import stage_programs
from rlhf_topologies.roofline import expected

COMPILED = 3
"""Candidates that are compiled, at most."""
REFINED = 2
"""Candidates for which sizes of `sampling.mesh.tensor` are tried."""
REMATS = ("none", "dots", "full")
REMAT, STEPS, TENSOR = "remat", "gradient_accumulation_steps", "sampling.mesh.tensor"
"""The fields that are chosen, besides the mesh."""
TRIES = 12
"""Numbers of micro-batches, at most, each twice the one before."""
Settings = Mapping[str, Mapping[str, Any]]
"""{stage: {dotted field: value}}."""


@dataclass(frozen=True)
class StageForecast:
    """What arithmetic says of a stage, per device.

    held: bytes that stay in memory. peaks: {program: bytes while it runs, with those}. rows: the largest of the
    programs whose memory depends on micro-batches; floor: of the others. seconds: of an update. samples: whether any
    program samples.
    """

    held: int
    peaks: Mapping[str, int]
    rows: int
    floor: int
    seconds: float
    samples: bool

    @property
    def peak(self) -> int:
        return max(self.rows, self.floor)


@dataclass(frozen=True)
class Candidate:
    """Settings of a pipeline on devices, and what arithmetic says of them."""

    topology: Topology
    mesh: Mapping[str, int]
    settings: Settings
    stages: Mapping[str, StageForecast]

    @property
    def peak(self) -> int:
        """Return the bytes per device of the largest program."""
        return max((stage.peak for stage in self.stages.values()), default=0)

    @property
    def fits(self) -> bool:
        return self.peak <= self.topology.chip.usable

    @property
    def seconds(self) -> float:
        """Return the time of an update of every stage, added up."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def order(self) -> tuple[bool, float]:
        return _order(self, self.topology.chip.usable)

    @property
    def sets(self) -> list[str]:
        """Write the settings as `--set` takes them."""
        tables = {"mesh": self.mesh, **self.settings}
        return [
            f"{name}.{key}={to_value(value)}"
            for name, table in tables.items()
            for key, value in table.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate as `--json` prints it."""
        return {
            "on": self.topology.name,
            "mesh": dict(self.mesh),
            "settings": {name: dict(table) for name, table in self.settings.items()},
            "fits": self.fits,
            "peak": self.peak,
            "seconds": self.seconds,
            "stages": {
                name: {"resident": stage.held, "programs": dict(stage.peaks), "seconds": stage.seconds}
                for name, stage in self.stages.items()
            },
        }

    def lines(self, file: PipelineFile) -> list[str]:
        """Write as TOML what differs from a pipeline: its mesh, and fields of its stages, under their names."""
        lines = [f"mesh = {to_value(self.mesh)}"]
        for stage in file.stages:
            table = dict(self.settings.get(stage.name, {}))
            if (size := table.pop(TENSOR, None)) is not None:
                table["sampling"] = {**stage.options.get("sampling", {}), "mesh": {"tensor": size}}
            table = {key: value for key, value in table.items() if stage.options.get(key) != value}
            if table:
                lines += ["", f"# stage {stage.name}"]
                lines += [f"{key} = {to_value(value)}" for key, value in table.items()]
        return lines


def _order(forecast: StageForecast | Candidate, usable: int) -> tuple[bool, float]:
    """Sort by this: the fastest of those that fit, then the smallest of the others."""
    fits = forecast.peak <= usable
    return not fits, forecast.seconds if fits else forecast.peak


def suggest(
    job: Mapping[str, Any],
    *,
    say: Callable[[str], None],
    save: Callable[[dict[str, Any]], None] = lambda results: None,
    find: Callable[[Topology], list[Any]] = find_devices,
    compiled: Callable[..., dict[str, Any]] = compile_pipeline,
) -> dict[str, Any]:
    """Search for the fastest settings that fit, on the fewest devices where the job does not say how many.

    job: as for `compile_pipeline`; `on` may be a chip alone, and `suggest` is the time limit in seconds. save: called
    with the results so far, since a compiler may be stopped for the time it takes. find: makes a topology's devices.
    compiled: compiles a pipeline.

    Returns {"ranked": candidates, best first; "compiled": the results of those that were; "chosen": the last of them if
    it fits, else None; "lines": to paste, none where nothing fits}.
    """
    began = time.monotonic()
    search = Search(job, find)
    results: dict[str, Any] = {"ranked": [], "compiled": [], "chosen": None, "lines": []}
    tried: list[list[str]] = []
    for topology in machines(job["on"]):
        while len(tried) < COMPILED:
            say(f"forecasting {topology.name}")
            candidates = search.candidates(topology, began + job["suggest"] / 2)
            others = [each for each in results["ranked"] if each["on"] != topology.name]
            results["ranked"] = [each.to_dict() for each in candidates] + others
            best = next((each for each in candidates if each.fits and each.sets not in tried), None)
            if best is None:
                break
            tried.append(best.sets)
            results["lines"] = best.lines(search.file())
            save(results)
            if time.monotonic() > began + job["suggest"]:
                return results
            made = compiled({**job, "on": topology.name, "sets": [*job["sets"], *search.sets(best)]}, say=say)
            results["compiled"].append({"candidate": best.to_dict(), **made})
            if all(stage["fits"] for stage in made["stages"].values()):
                return {**results, "chosen": best.to_dict()}
            results["lines"] = []
            search.correct(best, made["stages"])
    return results


class Search:
    """Describes a pipeline's stages on devices, and forecasts them by arithmetic.

    find: makes the devices of a topology. corrections: {work of programs: bytes that the compiler counted besides the
    stage's state, over those of arithmetic}.
    """

    def __init__(self, job: Mapping[str, Any], find: Callable[[Topology], list[Any]] = find_devices) -> None:
        self.job = job
        self.find = find
        self.host = plugins.load(files=[Path(file) for file in job["plugins"]])
        self.corrections: dict[str, float] = {}
        self._described: dict[str, dict[str, tuple[int, StagePrograms]]] = {}

    def file(self, sets: Sequence[str] = ()) -> PipelineFile:
        return read(self.job["pipeline"], sets=[*self.job["sets"], *sets], dir=self.job["dir"])

    def sets(self, candidate: Candidate) -> list[str]:
        """Write a candidate's settings as `--set` takes them, in place of every axis of the file's mesh."""
        others = [axis for axis in self.file().mesh if axis not in candidate.mesh]
        return [*(f"mesh.{axis}=1" for axis in others), *candidate.sets]

    def candidates(self, topology: Topology, until: float = math.inf) -> list[Candidate]:
        """Return a candidate for every mesh over the devices, best first.

        until: the `time.monotonic()` at which to return those found so far, at least one.
        """
        found: list[Candidate] = []
        for mesh in meshes(topology):
            if not found or time.monotonic() < until:
                found.append(self.candidate(topology, mesh))
        found.sort(key=lambda each: each.order)
        spread = max(found, key=lambda each: each.mesh["fsdp"])
        best = found[:REFINED]
        for first in best if spread in best else [*best, spread]:
            found += self._exchanging(topology, first, until)
        if not found[0].fits:
            found += self._cutting(topology, spread, until)
        found.sort(key=lambda each: each.order)
        for first in found[:REFINED]:
            found += self._sampled(topology, first, until)
        return sorted(found, key=lambda each: each.order)

    def _exchanging(self, topology: Topology, first: Candidate, until: float) -> Iterator[Candidate]:
        """Yield the candidate with each size of `expert`, in place of `fsdp`, that makes it better."""
        described = self._describe(topology, first.mesh, first.settings).values()
        models = [each.shape.model for _, stage in described for each in stage.programs if each.shape]
        counts = {expert_count(model) for model in models} - {0}
        for size in range(2, topology.machine + 1) if counts else ():
            spread = first.mesh["fsdp"]
            if spread % size or any(count % size for count in counts) or time.monotonic() >= until:
                continue
            mesh = {**first.mesh, "fsdp": spread // size, "expert": size}
            changed = self.candidate(topology, mesh)
            if changed.order < first.order:
                yield changed

    def _cutting(self, topology: Topology, first: Candidate, until: float) -> Iterator[Candidate]:
        """Yield the candidate with each size of `context`, in place of `fsdp`: rows cut in time take less memory."""
        spread = first.mesh["fsdp"]
        for size in (n for n in range(2, topology.machine + 1) if spread % n == 0):
            if time.monotonic() < until:
                try:
                    yield self.candidate(topology, {**first.mesh, "fsdp": spread // size, "context": size})
                except InputError:  # a model or attention that computes whole rows
                    return

    def _sampled(self, topology: Topology, first: Candidate, until: float) -> Iterator[Candidate]:
        """Yield the candidate with each size of the sampler's mesh that makes it better."""
        names = [name for name, stage in first.stages.items() if stage.samples]
        if not names or not first.fits or topology.count == 1:
            return
        for size in (n for n in range(1, topology.machine + 1) if topology.machine % n == 0):
            if time.monotonic() < until:
                tables = {name: {**first.settings[name], TENSOR: size} for name in names}
                try:
                    changed = self.candidate(topology, first.mesh, {**first.settings, **tables})
                except InputError:
                    continue  # heads or MLPs that so many devices cannot share
                if changed.order < first.order:
                    yield changed

    def candidate(
        self, topology: Topology, mesh: Mapping[str, int], settings: Settings | None = None
    ) -> Candidate:
        """Forecast every stage with the fastest remat that fits, and in as few micro-batches as fit.

        settings: to begin with. Raises InputError for those that the pipeline refuses.
        """
        chosen = {name: dict(table) for name, table in (settings or {}).items()}
        stages: dict[str, StageForecast] = {}
        usable = topology.chip.usable
        for _ in range(TRIES):
            described, growing = self._describe(topology, mesh, chosen), False
            for name, (steps, programs) in described.items():
                table = chosen.setdefault(name, {})
                by_remat = {
                    remat: self.forecast(programs, topology, mesh, remat) for remat in _remats(programs)
                }
                remat, best = min(by_remat.items(), key=lambda item: _order(item[1], usable))
                stages[name] = best
                table |= {} if remat is None else {REMAT: remat}
                more = more_steps(programs.programs, steps, mesh)
                if best.rows > usable >= best.floor and more is not None:
                    table[STEPS], growing = more, True
            if not growing:
                break
        return Candidate(topology, mesh, chosen, stages)

    def _describe(
        self, topology: Topology, mesh: Mapping[str, int], settings: Settings
    ) -> dict[str, tuple[int, StagePrograms]]:
        """Return {stage: (its micro-batches, its programs)} of the stages whose trainers describe any."""
        tables = {name: {k: v for k, v in table.items() if k != REMAT} for name, table in settings.items()}
        sets = self.sets(Candidate(topology, mesh, tables, {}))
        key = f"{topology.name} {sets}"
        if key not in self._described:
            with planned_devices(topology):
                planned = plan(self.file(sets), self.host)
                made = make_mesh(**planned.mesh, devices=self.find(topology))
                programs = stage_programs(planned, self.host, made)
            steps = {stage.name: stage.preview.gradient_accumulation_steps for stage in planned.stages}
            self._described[key] = {
                name: (steps[name], each) for name, each in programs.items() if each is not None
            }
        return self._described[key]

    def forecast(
        self, described: StagePrograms, topology: Topology, mesh: Mapping[str, int], remat: str | None
    ) -> StageForecast:
        """Forecast a stage. remat: in place of its own; None: its own."""
        held = sum(map(device_bytes, described.resident.values()))
        gradients = device_bytes(described.resident.get("parameters", ()))
        several = sum(program.calls for program in described.programs if program.work == "train") > 1
        peaks, by_work, seconds = {}, {"train": held, "read": held, "update": held, "sample": held}, 0.0
        with planned_devices(topology):
            for program in described.programs:
                shape, trains = program.shape, program.work == "train"
                size = gradients if program.work == "update" else (1 + several) * gradients if trains else 0
                if shape is not None:
                    if remat is not None and trains:
                        shape = shape._replace(model=shape.model.computing(remat=remat))
                    batch = (shape.rows, shape.time)
                    if shape.memory is None and program.work != "sample":
                        size += pass_bytes(shape.model, batch, mesh, trains=trains)
                    size += shape.memory or 0
                    seconds += program.calls * expected(program, shape, mesh, topology).seconds
                peak = held + round(size * self.corrections.get(program.work, 1.0))
                peaks[program.name] = peak
                by_work[program.work] = max(by_work[program.work], peak)
        rows, floor = max(by_work["train"], by_work["read"]), max(by_work["update"], by_work["sample"])
        return StageForecast(held, peaks, rows, floor, seconds, by_work["sample"] > held)

    def correct(self, candidate: Candidate, verdicts: Mapping[str, Any]) -> None:
        """Learn from programs that the compiler made larger than they fit, or refused. verdicts: {stage: verdict}."""
        usable, ratios = candidate.topology.chip.usable, dict[str, float]()
        for name, verdict in verdicts.items():
            for program in verdict["programs"]:
                forecast, work = candidate.stages[name], program["work"]
                if not program["fits"] and program["name"] in forecast.peaks:
                    estimated = max(forecast.peaks[program["name"]] - forecast.held, 1)
                    counted = max(program["peak"], 1.05 * usable if program["error"] else 0) - forecast.held
                    ratios[work] = max(ratios.get(work, 1.0), counted / estimated)
        for work, ratio in ratios.items():
            self.corrections[work] = ratio * self.corrections.get(work, 1.0)


def meshes(topology: Topology) -> list[dict[str, int]]:
    """List the meshes over all devices whose `tensor` is within a machine; first those that spread the most."""
    count = topology.count
    sizes = [n for n in range(count, 0, -1) if count % n == 0]
    return [
        {"data": count // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
        for tensor in reversed(sizes)
        for fsdp in sizes
        if count % (fsdp * tensor) == 0 and topology.machine % tensor == 0
    ]


def more_steps(programs: Sequence[Program], steps: int, mesh: Mapping[str, int]) -> int | None:
    """Return the number of micro-batches per update that halves the largest; None where they have no row to spare."""
    shapes = [
        (program.shape, program.calls) for program in programs if program.work == "train" and program.shape
    ]
    spread = math.prod(mesh.get(axis, 1) for axis in ROW_AXES)
    largest = max((shape.rows * shape.time for shape, _ in shapes if shape.rows > spread), default=0)
    if not largest:
        return None
    total = sum(calls * shape.rows * shape.time for shape, calls in shapes)
    return max(2 * steps, math.ceil(2 * total / largest))


def _remats(described: StagePrograms) -> list[str | None]:
    """List the settings of remat to choose from; none for models that decide for themselves."""
    models = [
        program.shape.model for program in described.programs if program.shape and program.work == "train"
    ]
    return list(REMATS) if models and all(hasattr(model, "remat") for model in models) else [None]
