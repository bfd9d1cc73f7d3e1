"""Shared by all tests: eight virtual CPU devices, one compilation cache, and the shared data where it is present."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import pytest

from rlhf_core.plugins import load_file
from tests.shared import commands

# Tests run their programs for milliseconds: what counts is the time to compile. Without optimisations and with XLA's
# older emitters it is less than half; programs so small are not worth splitting among threads.
QUICK = {"xla_backend_optimization_level": "0", "xla_cpu_parallel_codegen_split_count": "1"}
if jax.__version_info__ < (0, 12):  # XLA ends the process for a flag that it no longer has
    QUICK["xla_cpu_use_fusion_emitters"] = "false"
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [flags, *(f"--{name}={value}" for name, value in QUICK.items() if name not in flags)]
).strip()
# Under nohup, and in the background of a script, these are ignored, and runs would not stop for them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_num_cpu_devices", 8)
CACHE = os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "rlhf-test-compilation-cache")
)
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

os.environ.setdefault("RLHF_CACHE", str(Path(tempfile.gettempdir()) / "rlhf-test-cache"))

REPOSITORY = Path(__file__).resolve().parents[1]
sharing: Any = load_file(REPOSITORY / "tests" / "shared" / "sharing.py")


def pytest_collection_finish() -> None:
    """Make garbage collection rarer: tracing makes many objects, few of them in cycles.

    What imports and collection made is exempt: it stays, and each full collection would visit it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


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


PLAIN_ROOMS = (
    *("artifacts", "checkpoint", "cli", "data", "environments", "loggers", "pipeline", "report", "rewards"),
    *("runtime", "stage", "tokenizer", "workers"),
)
NEVER_TRACED = {
    *sys.stdlib_module_names,
    *("datasets", "huggingface_hub", "orbax", "transformers", "wandb"),
    *(f"rlhf_core.{room}" for room in PLAIN_ROOMS),
    "rlhf_topologies",
}
"""No program is traced of these modules, so patching them changes none; most patches are of these."""


class Patches(pytest.MonkeyPatch):
    """Patches that are traced: equal runs share their programs, and those of other tests have no patch."""

    traced = False

    def setattr(self, target: Any, *rest: Any, **options: Any) -> None:
        if isinstance(target, ModuleType):
            self.trace_anew(target.__name__)
        else:
            self.trace_anew(target if isinstance(target, str) else target.__module__)
        super().setattr(target, *rest, **options)

    def setitem(self, target: Any, *rest: Any) -> None:
        if target is not os.environ and target is not sys.modules:
            self.trace_anew("")
        super().setitem(target, *rest)

    def undo(self) -> None:
        super().undo()
        if self.traced:
            sharing.forget()

    def trace_anew(self, module: str) -> None:
        package, room, *_ = *module.split("."), ""
        if not {package, f"{package}.{room}"} & NEVER_TRACED:
            self.traced = True
            sharing.forget()


@pytest.fixture
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    patches = Patches()
    yield patches
    patches.undo()


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Small models and data; see tiny.py."""
    return load_file(REPOSITORY / "tests" / "shared" / "tiny.py")


MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
"""Every compiled program maps memory, and Linux lets a process have 65,530 maps: beyond them it dies."""


@pytest.fixture(autouse=True, scope="module")
def _few_compiled_programs() -> Iterator[None]:
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()  # programs that cycles hold


@pytest.fixture(autouse=True, scope="session")
def _programs_shared() -> Iterator[None]:
    """Share programs between the runs of this process, which are those of many tests; runs of users share none."""
    with sharing.programs_shared():
        yield


@pytest.fixture
def nothing_shared() -> Iterator[None]:
    """Share nothing between the runs of this test, as where users run."""
    with sharing.nothing_shared():
        yield


PLACES_OF_SCRIPTS = tuple(
    f"{place}{os.sep}"
    for place in (
        tempfile.gettempdir(),
        *(REPOSITORY / name for name in ("benchmarks", "docs", "examples", "tests/recipes")),
    )
)


@pytest.fixture(autouse=True, scope="module")
def _no_modules_of_scripts() -> Iterator[None]:
    """Forget the modules that scripts and pages import from their own directory.

    Several have a `judge`, a `task`, a `rewards`: what one file of tests imports must not be what the next one gets.
    """
    yield
    forget_modules_of_scripts()


def forget_modules_of_scripts() -> None:
    """Remove from `sys.modules` what was imported by its bare name from a place of scripts, except what is installed.

    The environment may be in such a place too, in a clone below /tmp, with `__main__`, which is pytest's own.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(PLACES_OF_SCRIPTS) and not file.startswith(sys.prefix) and Path(file).stem == name:
            del sys.modules[name]


FAKE_TRAINERS = Path(__file__).parent / "shared" / "fake_trainers.py"
CHAIN = """
seed = 7
[[stage]]
name = "base"
trainer = "fake"
model = { model_type = "llama" }
train_data = "train.jsonl"
[[stage]]
name = "rm"
trainer = "fake_rm"
model = "base.model"
[[stage]]
name = "policy"
trainer = "fake"
model = "base.model"
seed = 3
rewards = [{ name = "fake_model", model = "rm.model" }]
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The fake trainers' module, in an empty current directory and without the installed trainers."""
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "sft,reward,grpo,dpo,kto,distill")
    monkeypatch.chdir(tmp_path)
    module: ModuleType = load_file(FAKE_TRAINERS)
    module.EVENTS.clear()
    return module


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A chain of three stages in p.toml, with its data."""
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "p.toml"
    path.write_text(CHAIN)
    return path


@pytest.fixture(scope="session")
def short_runs() -> ModuleType:
    return load_file(Path(__file__).parent / "shared" / "short_runs.py")


@pytest.fixture(scope="module")
def shared_short(short_runs: ModuleType, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return short_runs.Short.of(tiny, tmp_path_factory.mktemp("short"))


@pytest.fixture
def short(shared_short: Any, tmp_path: Path) -> Any:
    """Runs of the three trainers in an empty directory; see short_runs.py."""
    return dataclasses.replace(shared_short, directory=tmp_path)


@pytest.fixture(scope="session")
def places() -> ModuleType:
    return load_file(Path(__file__).parent / "shared" / "places.py")


@pytest.fixture(scope="session")
def good(places: ModuleType, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """{name: content} of everything that the pipelines of places.py name."""
    files: dict[str, bytes] = places.good_files(repository, tmp_path_factory.mktemp("good"))
    return files


@pytest.fixture
def place(places: ModuleType, good: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The current directory, with everything that the pipelines name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command replaces it
    made = places.Place(tmp_path, good)
    made.restore()
    return made


class Ended(NamedTuple):
    code: int
    message: str
    """What stderr says, without progress and warnings."""
    warned: str
    out: str


@pytest.fixture
def rlhf(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command `rlhf` with these arguments, in this process."""

    def call(*arguments: str) -> Ended:
        capfd.readouterr()
        code = commands.typed(arguments)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err, err
        lines = [line for line in err.splitlines() if not line.startswith("[")]
        warned = [line for line in lines if line.startswith("warning: ")]
        message = "\n".join(line for line in lines if line not in warned)
        return Ended(code, message, "\n".join(warned), out)

    return call
