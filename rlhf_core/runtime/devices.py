"""The devices that programs are made for: those of this process, or planned ones that need not exist."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Planned:
    """Devices that a process only compiles for. platform: "gpu" or "tpu". memory: bytes that each may use."""

    platform: str
    count: int
    memory: int


_planned: Planned | None = None


def plan_for(planned: Planned | None) -> None:
    """Make `platform` and `device_count` answer for planned devices; None: for this process's own again."""
    global _planned
    _planned = planned


def planned() -> Planned | None:
    """Return the devices that this process only compiles for; None: its programs run on its own."""
    return _planned


def platform() -> str:
    """Return the platform that programs will run on: "cpu", "gpu" or "tpu"."""
    return jax.default_backend() if _planned is None else _planned.platform


def device_count() -> int:
    """Count the devices that programs will run on, of all processes."""
    return jax.device_count() if _planned is None else _planned.count
