"""Shared by all tests: eight virtual CPU devices, one compilation cache, and the shared data where it is present."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

from rlhf_core.plugins.component import load_file

# Tests run their programs for milliseconds: what counts is the time to compile. Without optimisations and with XLA's
# older emitters it is less than half.
QUICK = {"xla_backend_optimization_level": "0", "xla_cpu_use_fusion_emitters": "false"}
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [flags, *(f"--{name}={value}" for name, value in QUICK.items() if name not in flags)]
).strip()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and runs would not stop for it
jax.config.update("jax_num_cpu_devices", 8)
CACHE = os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "rlhf-test-compilation-cache")
)
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

os.environ.setdefault("RLHF_CACHE", str(Path(tempfile.gettempdir()) / "rlhf-test-cache"))

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of real data and golden files; tests that use it skip where it is absent."""
    path = Path(os.environ.get("RLHF_SHARED", REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no shared data at {path}; set RLHF_SHARED to its directory")
    return path


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Small models and data; see tiny.py."""
    return load_file(REPOSITORY / "tests" / "tiny.py")


MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
"""Every compiled program maps memory, and Linux lets a process have 65,530 maps: beyond them it dies."""


@pytest.fixture(autouse=True, scope="module")
def _few_compiled_programs() -> Iterator[None]:
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
