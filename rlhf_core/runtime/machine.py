"""The machine that programs run on: its devices, or planned ones that need not exist, and its memory."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rlhf_core.runtime import computes_on_cpu
from rlhf_core.runtime.agreement import gather_maximum
from rlhf_core.runtime.caches import forget

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_GROUP = Path("/sys/fs/cgroup")
_LIMITS = (_GROUP / "memory.max", _GROUP / "memory/memory.limit_in_bytes")
MUCH_KEPT = 2**30
"""Bytes that a process may hold without returning any."""
ROOM = 2
"""Kept memory stays while the machine has this many times as much."""


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
    devices = planned()
    return jax.default_backend() if devices is None else devices.platform


def device_count() -> int:
    """Count the devices that programs will run on, of all processes."""
    devices = planned()
    return jax.device_count() if devices is None else devices.count


def device_memory() -> int | None:
    """Return the bytes that a program may use of the smallest of all processes' devices; None where they do not say."""
    devices = planned()
    if devices is not None:
        return devices.memory
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    least = min(stats.get("bytes_limit", 0) for stats in statistics)
    return -int(gather_maximum([-least])[0]) or None


def machine_memory() -> int | None:
    """Return the bytes of memory this process may use: the machine's, or its container's limit; None if unknown."""
    sizes = []
    with suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no number
            sizes.append(int(path.read_text()))
    return min(sizes, default=None)


def available_memory() -> int | None:
    """Return the bytes that this process may still take of the machine's memory or its container's; None if unknown."""
    sizes = []
    with suppress(OSError, ValueError, KeyError):
        sizes.append(_table("/proc/meminfo")["MemAvailable:"] * 1024)
    with suppress(OSError, ValueError, KeyError):
        used = int((_GROUP / "memory.current").read_text()) - _table(_GROUP / "memory.stat")["inactive_file"]
        sizes.append(int((_GROUP / "memory.max").read_text()) - used)
    return min(sizes, default=None)


def _table(file: str | Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    return {name: int(number) for name, number, *_ in map(str.split, Path(file).read_text().splitlines())}


def resident_bytes() -> int:
    """Return the bytes that this process holds in memory; 0 where the system does not say (not Linux)."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def forget_peak() -> None:
    """Reset `peak_host_bytes` to count from now on, where the system allows it (Linux)."""
    with suppress(OSError):
        _CLEAR.write_text("5")


def peak_host_bytes() -> int:
    """Return the peak resident bytes of this process, since `forget_peak` where the system allows that."""
    with suppress(OSError):
        match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if match:
            return int(match[1]) * 1024
    import resource

    # Kibibytes; on macOS, bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_memory() -> dict[str, float]:
    """Return peaks in bytes: "memory/peak_rss_bytes", of this process on the host since the stage began, and
    "memory/peak_bytes", of its fullest device since the process began, where devices count it (CPUs do not).
    """
    peaks_by_name = {"memory/peak_rss_bytes": float(peak_host_bytes())}
    statistics = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    peaks = [stats["peak_bytes_in_use"] for stats in statistics if "peak_bytes_in_use" in stats]
    return peaks_by_name | ({"memory/peak_bytes": float(max(peaks))} if peaks else {})


def peak_line() -> str:
    """Describe the peak memory of a stage: of the fullest device where devices count it, else of this process."""
    peaks = peak_memory()
    device = peaks.get("memory/peak_bytes")
    host = peaks["memory/peak_rss_bytes"]
    if device is None:
        return f"this process held up to {host / 1e9:.1f} GB"
    return f"the fullest device held up to {device / 1e9:.1f} GB"


def return_freed_memory() -> None:
    """Return freed memory to the system if this process holds much and the machine has little more.

    Kept memory is fragmented: a program that needs 4 GB in one piece may find two free halves, and take 4 GB more.
    Every GB returned costs up to a second when it is taken again, so it stays while there is room for that.
    """
    held, available = resident_bytes(), available_memory()
    if held > MUCH_KEPT and available is not None and available < ROOM * held and computes_on_cpu():
        trim_memory()


def trim_memory() -> None:
    """Return freed memory to the system, where the C library keeps it."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def free_memory() -> None:
    """Free what a stage leaves behind: arrays in reference cycles, and its compiled programs."""
    gc.collect()
    forget()
    return_freed_memory()


def array_bytes(tree: Any) -> int:
    """Count the bytes of a tree of arrays or of shapes; keys of random numbers count 4 per element."""
    return sum(math.prod(x.shape) * getattr(x.dtype, "itemsize", 4) for x in jax.tree.leaves(tree))


def format_bytes(size: float) -> str:
    """Format a number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
