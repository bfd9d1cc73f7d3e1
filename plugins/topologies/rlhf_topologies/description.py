"""Programs of a stage as they are compiled from shapes alone, and what is in memory with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PARAMETERS = ("parameters", "frozen parameters")
"""Residents of a stage that are all parameters of the model that is trained."""


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
    rows: of a call's batch, padding included; of a sampler the sequences that all devices decode at once; None: none.
    """

    name: str
    lower: Callable[[], Any]
    work: Literal["train", "read", "sample", "update"]
    calls: float = 1.0
    tokens: float = 0.0
    steps: int = 0
    reads: tuple[str, ...] = ()
    host: float = 0.0
    rows: int | None = None


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
