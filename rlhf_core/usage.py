"""How much memory a run has taken, as the machine counts it."""

from __future__ import annotations

import sys

import jax


def peak_memory() -> dict[str, float]:
    """{"memory/peak_rss_bytes": of this process on the host, "memory/peak_bytes": of its fullest device}, since the
    process began; the latter only where the devices count it, which CPUs do not.
    """
    import resource

    # Kibibytes, but on macOS bytes.
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = {"memory/peak_rss_bytes": float(rss)}
    counted = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    peaks = [stats["peak_bytes_in_use"] for stats in counted if "peak_bytes_in_use" in stats]
    return found | ({"memory/peak_bytes": float(max(peaks))} if peaks else {})
