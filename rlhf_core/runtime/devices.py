"""The devices that programs are made for: those of this process, or planned ones that need not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Planned:
    """Devices that a process only compiles for. platform: "gpu" or "tpu". memory: bytes that each may use."""

    platform: str
    count: int
    memory: int


_planned: ContextVar[Planned | None] = ContextVar("planned devices", default=None)


@contextmanager
def planning_for(planned: Planned) -> Iterator[None]:
    """Make `platform` and `device_count` answer for planned devices inside the block, in this thread."""
    token = _planned.set(planned)
    try:
        yield
    finally:
        _planned.reset(token)


def planned() -> Planned | None:
    """Return the devices that this process only compiles for; None: its programs run on its own."""
    return _planned.get()


def platform() -> str:
    """Return the platform that programs will run on: "cpu", "gpu" or "tpu"."""
    return jax.default_backend() if (devices := planned()) is None else devices.platform


def device_count() -> int:
    """Count the devices that programs will run on, of all processes."""
    return jax.device_count() if (devices := planned()) is None else devices.count
