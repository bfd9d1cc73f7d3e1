"""Enter a run: set up the process, join the job's other processes, and stop on signals."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rlhf_core.runtime import job
from rlhf_core.runtime.caches import own_run
from rlhf_core.runtime.signals import stop_if_asked
from rlhf_core.runtime.signals import stop_signals as stop_signals

MIN_COMPILE_SECONDS = 0.05
OPTIMIZATION = "--xla_backend_optimization_level"
_MALLOPT = {  # numbers from glibc's malloc.h
    "M_TRIM_THRESHOLD": (-1, -1),  # never: any positive number ends at 2 GiB
    "M_TOP_PAD": (-2, 2**28),
    "M_MMAP_MAX": (-4, 0),
    "M_ARENA_MAX": (-8, 1),
}


@contextmanager
def session() -> Iterator[None]:
    """Enter a run of this process: every door to training enters it before it reads plugins, files or devices.

    Inside, a signal asks the run to stop, nothing that an earlier run left in memory is used, and an error ends the
    job's other processes too. A session inside another one is part of it. Raises Stopped where a signal came first.
    """
    with stop_signals(redeliver=True), own_run():
        stop_if_asked("before anything was trained")
        prepare()
        stop_if_asked("before anything was trained")
        with job.joint_run():
            yield


def prepare() -> None:
    """Set up the allocator, the compiler and its cache, and join the job's other processes. Safe to call again.

    In a job of one process, starts no backend, so that the number of devices can still be set.
    """
    if computes_on_cpu():
        keep_freed_memory()
        compile_quickly()
    use_compilation_cache()
    job.join()


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory; return False if the C library is not glibc.

    XLA on CPU allocates new buffers in every step. By default glibc maps each one from the kernel and unmaps it when
    freed, so every page is faulted in and zeroed again, which takes up to a fifth of a step.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018  (musl has a mallopt that does nothing)
    except (OSError, AttributeError):
        return False
    accepted = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in _MALLOPT.values()]
    return all(accepted)


def compile_quickly() -> None:
    """Set LLVM's optimization to level 1 of 3, unless `XLA_FLAGS` sets it. No effect once a backend has started.

    Matrix products are a library's; the other kernels of a step run as fast as at level 3 and compile in two thirds of
    the time.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if OPTIMIZATION not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {OPTIMIZATION}=1".strip()


def use_compilation_cache() -> None:
    """Cache compiled programs in `$XDG_CACHE_HOME/rlhf/compilation`.

    Leaves alone what the user set through `JAX_COMPILATION_CACHE_DIR` and related variables or `jax.config`.
    """
    import jax

    config: Any = jax.config
    minimum = "jax_persistent_cache_min_compile_time_secs"
    if minimum.upper() not in os.environ and getattr(config, minimum) == 1.0:  # jax's default
        config.update(minimum, MIN_COMPILE_SECONDS)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or config.jax_compilation_cache_dir is not None:
        return
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # the home is not writable: compile every time
        return
    config.update("jax_compilation_cache_dir", str(directory))


def cache_directory() -> Path:
    """Return the default directory of compiled programs. By the XDG rules a relative path counts as unset."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        root = Path.home() / ".cache"
    return root / "rlhf" / "compilation"


def cache_root() -> Path:
    """Return `$RLHF_CACHE`, by default the directory that compiled programs are in. It may be deleted at any time."""
    root = os.environ.get("RLHF_CACHE")
    return Path(root).expanduser() if root else cache_directory().parent


def computes_on_cpu() -> bool:
    """Predict whether jax will pick the CPU, from its setting or what is installed, without starting a backend."""
    import jax

    config: Any = jax.config
    chosen: str | None = config.jax_platforms
    if chosen:
        return chosen.split(",")[0] == "cpu"
    installed = entry_points(group="jax_plugins") or importlib.util.find_spec("jax_plugins")
    return not installed and importlib.util.find_spec("libtpu") is None
