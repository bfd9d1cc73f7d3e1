"""Start-up settings, each tested in its own process, since they apply to a whole process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_core import runtime
from rlhf_core.runtime import machine

free_memory = machine.free_memory
"""As it is imported: runs of tests leave it out."""
HEAP = """
import ctypes, sys
from rlhf_core import runtime
runtime.prepare()
runtime.prepare()
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
address = malloc(64 * 2**20)
low, high = next(
    (int(x, 16) for x in line.split()[0].split("-")) for line in open("/proc/self/maps") if "[heap]" in line
)
print(low <= address < high)
"""
CACHE = """
import sys
from rlhf_core import runtime
from rlhf_core.runtime.compiled import compiled_so_far
import jax
if len(sys.argv) > 1:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.25)
runtime.prepare()
runtime.prepare()
jax.config.update("jax_num_cpu_devices", 3)  # an error once there is a backend
print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
before = compiled_so_far()
jax.jit(lambda x: x * 2 + len(sys.argv))(1.0)
print(jax.device_count())
found = compiled_so_far().since(before)
print(found.programs, found.cached, found.seconds > 0)
"""
FLAGS = """
import os
from rlhf_core import runtime
runtime.prepare()
runtime.prepare()
import jax
jax.jit(abs)(1.0)  # an unknown flag ends the process
print(*os.environ.get("XLA_FLAGS", "none").split())
"""


def run(script: str, *arguments: object, **environment: object) -> list[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=kept | {"JAX_PLATFORMS": "cpu"} | {k: str(v) for k, v in environment.items()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_large_blocks_come_from_the_heap_on_cpu_only() -> None:
    assert run(HEAP) == ["True"]
    assert run(HEAP, JAX_PLATFORMS="cuda,cpu") == ["False"]


def test_cache_is_in_the_users_cache_directory(tmp_path: Path) -> None:
    expected = tmp_path / "rlhf" / "compilation"
    for cached in ("0", "1"):  # the second time it reads what the first one wrote, and says nothing
        found = run(CACHE, XDG_CACHE_HOME=tmp_path)
        assert found == [str(expected), "0.05", "3", "1", cached, "True"]
    assert list(expected.iterdir())


def test_what_the_user_chose_stands(tmp_path: Path) -> None:
    """The directory by the environment, and the seconds by jax's config, which the script sets."""
    chosen = {"JAX_COMPILATION_CACHE_DIR": tmp_path / "env"}
    assert run(CACHE, tmp_path / "env", HOME=tmp_path, **chosen)[:2] == [str(tmp_path / "env"), "0.25"]
    assert not (tmp_path / ".cache").exists()


@pytest.mark.long
def test_what_the_user_chose_in_one_place_stands(tmp_path: Path) -> None:
    chosen = {
        "JAX_COMPILATION_CACHE_DIR": tmp_path / "env",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1.0",
    }
    assert run(CACHE, HOME=tmp_path, **chosen)[:2] == [str(tmp_path / "env"), "1.0"]
    assert run(CACHE, tmp_path / "config", HOME=tmp_path)[:2] == [str(tmp_path / "config"), "0.25"]
    assert not (tmp_path / ".cache").exists()


@pytest.mark.long
def test_programs_compile_quickly_on_cpu_unless_the_user_says_how() -> None:
    quick = "--xla_backend_optimization_level=1"
    assert run(FLAGS) == [quick]
    assert run(FLAGS, XLA_FLAGS="--xla_cpu_multi_thread_eigen=true") == [
        "--xla_cpu_multi_thread_eigen=true",
        quick,
    ]
    assert run(FLAGS, XLA_FLAGS="--xla_backend_optimization_level=3") == [
        "--xla_backend_optimization_level=3"
    ]
    assert run(FLAGS.replace("jax.jit(abs)", "abs"), JAX_PLATFORMS="cuda") == ["none"]


def test_a_home_that_cannot_be_written_to_means_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(CACHE, XDG_CACHE_HOME=tmp_path / "file")[:3] == ["None", "0.05", "3"]


def test_relative_cache_home_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert runtime.cache_directory() == tmp_path / ".cache" / "rlhf" / "compilation"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert runtime.keep_freed_memory() is False


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that keeps memory")
@pytest.mark.parametrize(
    ("available", "returned"),
    [
        ("0", True),
        *(pytest.param(bytes_left, False, marks=pytest.mark.long) for bytes_left in ("None", "2**40")),
    ],
)
def test_kept_memory_is_returned_where_there_is_little_more(available: str, returned: bool) -> None:
    script = f"""
import numpy as np
from rlhf_core import runtime
from rlhf_core.runtime import machine
runtime.prepare()
machine.MUCH_KEPT = 2**27
machine.available_memory = lambda: {available}
arrays = [np.ones(2**21) for _ in range(32)]  # half a gibibyte
used = np.ones(2**24)  # behind them, so that what they leave is a hole
before = machine.resident_bytes()
del arrays
machine.return_freed_memory()
print(before - machine.resident_bytes() > 2**28, used[0])
"""
    assert run(script) == [str(returned), "1.0"]


def test_what_a_stage_leaves_behind_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays in cycles, then programs; not those of this process, which other tests would compile again."""
    done: list[str] = []
    monkeypatch.setattr(machine, "gc", SimpleNamespace(collect=lambda: done.append("arrays")))
    monkeypatch.setattr(machine, "forget", lambda: done.append("programs"))
    monkeypatch.setattr(machine, "return_freed_memory", lambda: done.append("memory"))
    free_memory()
    assert done == ["arrays", "programs", "memory"]


def test_what_is_available_is_less_than_the_machine_has() -> None:
    available, whole = machine.available_memory(), machine.machine_memory()
    assert available is not None
    assert whole is not None
    assert 0 < available < whole
    assert 0 < machine.resident_bytes() < whole
