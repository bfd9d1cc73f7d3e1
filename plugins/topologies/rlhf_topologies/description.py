"""Programs of a stage as they are compiled from shapes alone, and what is in memory with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

PARAMETERS = ("parameters", "frozen parameters")
"""Residents of a stage that are all parameters of the model that is trained."""


class ProgramShape(NamedTuple):
    """What a program computes with, for a forecast of its memory and time without compiling it.

    model: a `rlhf_core.models.Definition`. rows, time: of a call's batch, padding included; of a sampler the sequences
    that all devices decode at once, and the tokens of each. tensor: devices that share each layer; None: as the
    stage's mesh has it. memory: bytes per device besides the stage's residents; None: they follow from the rest.
    step_bytes: those of them that a step of a sampler reads, on average; None: all.
    """

    model: Any
    rows: int
    time: int
    tensor: int | None = None
    memory: int | None = None
    step_bytes: int | None = None


@dataclass(frozen=True)
class Program:
    """A program that a stage runs, to be compiled from shapes alone.

    name: such as "accumulate 8 × 2048". lower: returns `jax.jit(…).lower(…)` of it, whose arguments are
    jax.ShapeDtypeStructs with shardings on the stage's mesh.
    work: what it does with tokens: "train" (forward and backward), "read" (forward), "sample" or "update" (no tokens).
    calls: per update, on average. tokens: that a call reads, or samples, without padding.
    steps: at most so often per call runs the loop whose number of rounds depends on data, such as decoding; 0: no loop.
    reads: those of `StagePrograms.resident` that are among its arguments, each as often as it is.
    host: bytes per call that a device gets from the host's memory, where they wait; as many may go back.
    shape: for `--suggest`, which ranks by arithmetic before it compiles; None: counted as if it took nothing.
    """

    name: str
    lower: Callable[[], Any]
    work: Literal["train", "read", "sample", "update"]
    calls: float = 1.0
    tokens: float = 0.0
    steps: int = 0
    reads: tuple[str, ...] = ()
    host: float = 0.0
    shape: ProgramShape | None = None


@dataclass(frozen=True)
class StagePrograms:
    """The programs of a stage, and what is in the devices' memory while any of them runs.

    resident: {name: tree of jax.ShapeDtypeStructs with shardings}, such as "parameters" (those that are trained),
        "frozen parameters", "optimizer", "reference".
    weights: parameters of the model that each token is multiplied with, for its FLOPs: 2 forward, 4 backward.
    note: what is not among them, and why.
    """

    programs: tuple[Program, ...] = ()
    resident: Mapping[str, Any] = field(default_factory=dict)
    weights: int = 0
    note: str | None = None
