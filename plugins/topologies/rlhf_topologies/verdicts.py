"""Judge compiled programs: whether a stage fits its devices, how fast it can be at most, and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.runtime.peak_memory import format_bytes
from rlhf_topologies.counts import Counts
from rlhf_topologies.names import Topology
from rlhf_topologies.roofline import Bound, bound, main_loop

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""In the message of a compiler that refuses a program for its memory, as the TPU's does."""
FORWARD, TRAINING = 2, 6
"""Operations per parameter and token of a forward pass, and of one with its backward pass."""


@dataclass(frozen=True)
class Verdict:
    """One program on one device.

    peak: bytes while it runs, with what lies in memory beside it; parts: of what. once: what a call does outside its
    main loop; step: a round of that loop. seconds: per call, at least. by: what sets that.
    rows: of a call's batch, on all devices; None: unknown. error: why it could not be compiled.
    """

    name: str
    work: str
    calls: float
    tokens: float
    steps: int
    peak: int
    parts: Mapping[str, int]
    fits: bool
    once: Counts
    once_bound: Bound
    step: Counts | None
    step_bound: Bound
    rows: int | None = None
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.once_bound.seconds + self.steps * self.step_bound.seconds

    @property
    def by(self) -> str:
        in_loop = self.steps * self.step_bound.seconds > self.once_bound.seconds
        return (self.step_bound if in_loop else self.once_bound).by

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as `--json` prints it."""
        return {
            **{
                name: getattr(self, name)
                for name in ("name", "work", "calls", "tokens", "steps", "peak", "fits")
            },
            "memory": dict(self.parts),
            "seconds": self.seconds,
            "bound": self.by,
            "call": {**self.once.to_dict(), "flops": self.once.flops, "seconds": asdict(self.once_bound)},
            "step": None
            if self.step is None
            else {**self.step.to_dict(), "flops": self.step.flops, "seconds": asdict(self.step_bound)},
            "error": self.error,
        }


@dataclass(frozen=True)
class StageVerdict:
    """A stage on its devices.

    resident: {what: bytes per device} during the whole stage. note: what was not compiled, and why. usable: bytes per
    device.
    update_seconds: at least; training_tokens, sampled_tokens: per update. training_mfu, sampling_mfu: FLOPs that the
    model needs over those that the devices could do in the time, at most.
    advice: what to change where something does not fit.
    """

    name: str
    programs: tuple[Verdict, ...]
    resident: Mapping[str, int]
    usable: int
    note: str | None = None
    training_tokens: float = 0.0
    sampled_tokens: float = 0.0
    training_seconds: float = 0.0
    sampling_seconds: float = 0.0
    update_seconds: float = 0.0
    training_mfu: float = 0.0
    sampling_mfu: float = 0.0
    advice: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return all(program.fits for program in self.programs)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as `--json` prints it."""
        numbers = (
            "usable training_tokens sampled_tokens training_seconds sampling_seconds update_seconds training_mfu "
            "sampling_mfu"
        )
        return {
            "fits": self.fits,
            "note": self.note,
            "resident": dict(self.resident),
            **{name: getattr(self, name) for name in numbers.split()},
            "programs": [program.to_dict() for program in self.programs],
            "advice": list(self.advice),
        }


def judge_stage(
    name: str, stage: Mapping[str, Any] | None, topology: Topology, mesh: Mapping[str, int]
) -> StageVerdict:
    """Judge a stage from what `compile_pipeline` returned of it; None: its trainer does not describe its programs."""
    usable = topology.chip.usable
    if stage is None:
        return StageVerdict(
            name, (), {}, usable, note="not compiled: its trainer does not describe its programs"
        )
    programs = tuple(_program(facts, topology) for facts in stage["programs"])
    training = [p for p in programs if p.work in ("train", "update")]
    sampling = [p for p in programs if p.work == "sample"]
    seconds = {
        key: sum(p.calls * p.seconds for p in group)
        for key, group in (("training", training), ("sampling", sampling), ("update", programs))
    }
    tokens = {
        work: sum(p.calls * p.tokens for p in programs if p.work == work) for work in ("train", "sample")
    }
    peak = topology.count * max(topology.chip.flops.values())
    return StageVerdict(
        name,
        programs,
        stage["resident"],
        usable,
        stage["note"],
        tokens["train"],
        tokens["sample"],
        seconds["training"],
        seconds["sampling"],
        seconds["update"],
        _share(stage["weights"] * TRAINING * tokens["train"], seconds["training"] * peak),
        _share(stage["weights"] * FORWARD * tokens["sample"], seconds["sampling"] * peak),
        tuple(advice(programs, stage["resident"], topology, mesh, remat=stage["remat"])),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _program(facts: Mapping[str, Any], topology: Topology) -> Verdict:
    numbers = {key: facts[key] for key in ("name", "work", "calls", "tokens", "steps", "rows")}
    if "error" in facts:
        nothing: dict[str, Any] = {
            "once": Counts(),
            "once_bound": Bound(),
            "step": None,
            "step_bound": Bound(),
        }
        return Verdict(**numbers, peak=0, parts={}, fits=False, **nothing, error=facts["error"])
    memory = facts["memory"]
    parts = {
        "arguments": memory["arguments"],
        "temporary": memory["temporary"],
        "outputs": memory["outputs"] - memory["aliased"],
        "beside": facts["beside"],
    }
    peak = sum(parts.values())
    once = Counts.from_dict(facts["once"])
    loops = [Counts.from_dict(loop) for loop in facts["loops"]]
    step = main_loop(loops) if loops and facts["steps"] else None
    return Verdict(
        **numbers,
        peak=peak,
        parts=parts,
        fits=peak <= topology.chip.usable,
        once=once,
        once_bound=bound(once, topology.chip),
        step=step,
        step_bound=Bound() if step is None else bound(step, topology.chip),
    )


def advice(
    programs: Sequence[Verdict],
    resident: Mapping[str, int],
    topology: Topology,
    mesh: Mapping[str, int],
    *,
    remat: str,
) -> list[str]:
    """Say what to change, most effective first, where programs do not fit. remat: the stage's setting."""
    large = [program for program in programs if not program.fits]
    lines = [
        f"{p.name}: the compiler says: {p.error}" for p in large if p.error and OUT_OF_MEMORY not in p.error
    ]
    large = [p for p in large if not p.error or OUT_OF_MEMORY in p.error]
    if not large:
        return lines
    usable, held = topology.chip.usable, sum(resident.values())
    spread = mesh["fsdp"] * mesh["tensor"]
    state = f"{format_bytes(held)} of {format_bytes(usable)} are the stage's {', '.join(resident)}"
    if held > usable / 2 and spread < topology.count:
        lines.append(f"{state}: set mesh = {{ fsdp = {topology.count // mesh['tensor']} }}")
    elif held > usable / 2:
        lines.append(f"{state}: use more devices, or train adapters with lora = {{ rank = 16 }}")
    works = {program.work for program in large}
    if "train" in works:
        rows = [program.rows for program in large if program.work == "train"]
        fewest = mesh["data"] * mesh["fsdp"]
        one_each = all(count is not None and count <= fewest for count in rows)
        steps = [
            *([] if remat == "full" else ['set remat = "full"']),
            "share each layer, since every device has one row already (mesh.tensor)"
            if one_each
            else "raise gradient_accumulation_steps",
            "shorten rows (max_sequence_length, or max_completion_length and num_generations)",
        ]
        lines.append("for micro-batches: " + ", then ".join(steps))
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
