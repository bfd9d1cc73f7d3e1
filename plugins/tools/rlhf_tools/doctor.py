"""Say what is installed, what a run would compute on, and what is wrong, with what to type."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.constants import HF_HOME
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhf_core import InputError, plugins, runtime
from rlhf_core.config.toml import parse_toml
from rlhf_core.errors import error_line, library_words
from rlhf_core.runtime.distributions import COMMANDS, find_points, owner
from rlhf_core.runtime.machine import available_memory, format_bytes, machine_memory
from rlhf_tools.missing import is_installed, missing

LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "transformers",
    "tokenizers",
    "datasets",
)
LITTLE = 2 * 10**9
"""Bytes of disk or memory below which a small run may fail."""
GPUS = ("/dev/nvidia0",)
TPUS = ("/dev/accel0", "/dev/vfio/0")
KERNELS = "rlhf-kernels"
SUPPORT = {"cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
"""{extra: the distributions of which one makes jax use the accelerator}."""


class Finding(NamedTuple):
    """A line of the report; problem: what is wrong, and what to type."""

    name: str
    value: str
    problem: str = ""


def examine() -> list[Finding]:
    """Examine this environment."""
    return [*software(), *devices(), *memory(), *extensions(), *disks()]


def software() -> Iterator[Finding]:
    """Versions, and requirements of this suite's distributions that are not met."""
    yield Finding("Python", f"{platform.python_version()}, {platform.platform()}")
    ours = sorted({d.name for d in distributions() if d.name and d.name.startswith("rlhf-")})
    yield Finding(
        "rlhf", ", ".join(f"{name.removeprefix('rlhf-')} {distribution(name).version}" for name in ours)
    )
    yield Finding("libraries", ", ".join(f"{name} {version_of(name) or 'missing'}" for name in LIBRARIES))
    for name in ours:
        for requirement in unmet(distribution(name)):
            installed = version_of(requirement.name)
            yield Finding(
                name,
                f"needs {requirement}",
                f"{name} needs {requirement}, and {installed or 'none'} is installed: pip install '{requirement}'",
            )


def unmet(dist: Distribution) -> Iterator[Requirement]:
    """Yield the requirements of a distribution, without its extras, that what is installed does not meet."""
    for text in dist.requires or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = version_of(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            yield requirement


def version_of(name: str) -> str | None:
    try:
        return distribution(canonicalize_name(name)).version
    except PackageNotFoundError:
        return None


def devices() -> Iterator[Finding]:
    """What jax finds, and an accelerator that it does not use."""
    import jax

    log = logging.getLogger("jax._src.xla_bridge")
    tracebacks = Tracebacks()
    log.addFilter(tracebacks)
    try:
        found: Sequence[Any] = jax.devices()
    except Exception as error:
        yield Finding(
            "devices",
            "none",
            f"jax finds no device: {error}; JAX_PLATFORMS=cpu computes on the CPU",
        )
        return
    finally:
        log.removeFilter(tracebacks)
    kinds = [device.device_kind for device in found]
    text = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    sizes = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in found]
    yield Finding("devices", text + (f", {format_bytes(min(sizes))} each" if all(sizes) else ""))
    if found[0].platform != "cpu":
        version = version_of(KERNELS)
        missing = f"none, so XLA computes attention and experts: pip install {KERNELS}"
        yield Finding("kernels", f"{KERNELS} {version}" if version else missing)
    asked = os.environ.get("JAX_PLATFORMS")
    if asked:
        yield Finding("JAX_PLATFORMS", asked)
    elif found[0].platform == "cpu":
        for what, files, extra in (("GPU", GPUS, "cuda"), ("TPU", TPUS, "tpu")):
            problem = unused(what, files, extra, tracebacks.reasons)
            if problem:
                yield Finding(what, "not used", problem)


class Tracebacks(logging.Filter):
    """Keep why jax could not use an accelerator, in place of the traceback that it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            self.reasons.append(str(record.exc_info[1]))
        return not record.exc_info


def unused(what: str, files: Sequence[str], extra: str, reasons: Sequence[str]) -> str:
    """Return what is wrong if jax computes on the CPU next to an accelerator, or with support for one, else ""."""
    there = any(os.path.exists(file) for file in files)
    if not any(version_of(name) for name in SUPPORT[extra]):
        advice = f"pip install 'rlhf-core[{extra}]'"
        return f"this machine has a {what}, and jax computes on the CPU: {advice}" if there else ""
    if there:
        why = "; ".join(reasons) or "its driver may be too old"
        return f"this machine has a {what}, and jax[{extra}] computes on the CPU: {why}"
    container = "; a container needs --device nvidia.com/gpu=all" if extra == "cuda" else ""
    return (
        f"jax[{extra}] is installed, and no {what} is visible, so jax computes on the CPU{container}; "
        "if that is meant, JAX_PLATFORMS=cpu"
    )


def memory() -> Iterator[Finding]:
    total, free = machine_memory(), available_memory()
    if total is None or free is None:
        return
    low = f"only {format_bytes(free)} of memory is free: end other programs" if free < LITTLE else ""
    yield Finding("memory", f"{format_bytes(free)} free of {format_bytes(total)}", low)


def extensions() -> Iterator[Finding]:
    """Plugins by state, and commands that cannot be loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        infos = plugins.load().plugins
    for info in infos:
        name = info.distribution or info.name
        if info.state == "failed":
            yield Finding(name, "failed", str(info.error))
        elif info.state == "disabled":
            yield Finding(name, f"disabled by {plugins.DISABLE}")
    loaded = [info.distribution or info.name for info in infos if info.state == "loaded"]
    yield Finding("plugins", ", ".join(loaded))
    names: dict[str, str] = {}
    for point in sorted(find_points(COMMANDS), key=lambda point: point.name):
        if point.name in names:
            both = f"{names[point.name]} and {owner(point)}"
            yield Finding(
                point.name, "twice", f"{both} both have the command rlhf {point.name}: uninstall one"
            )
        names[point.name] = owner(point)
        try:
            point.load()
        except Exception as error:
            why = f"the command rlhf {point.name} cannot be loaded: {error_line(error)}"
            yield Finding(point.name, "failed", f"{why}; update or uninstall {owner(point)}")
    yield Finding("commands", ", ".join(names))


def of_pipeline(path: Path) -> Iterator[Finding]:
    """What a pipeline names and is not installed. Raises InputError for a file that cannot be read."""
    try:
        table = parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {library_words(error)}") from None
    stages = table.get("stage")
    stages = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry = plugins.load().registry
    packages = missing(stages, path.parent, registry)
    for package, components in packages.items():
        what = ", ".join(components)
        problem = f"{path}: {what}: not installed: pip install {shlex.quote(package)}"
        if is_installed(package):
            problem = f"{path}: {what}: {package} is installed and not loaded: see its line above"
        yield Finding(path.name, f"needs {package}, for {what}", problem)
    if not packages:
        yield Finding(path.name, "all components that it names are installed")


def disks() -> Iterator[Finding]:
    """The cache of compiled programs, and the room where runs and downloads are written."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    cache = Path(given) if given else runtime.cache_directory()
    files = [file for file in cache.glob("*") if file.is_file()] if cache.is_dir() else []
    size = format_bytes(sum(file.stat().st_size for file in files))
    broken = (
        ""
        if writable(cache)
        else f"{cache} cannot be written, so every run compiles again: set XDG_CACHE_HOME"
    )
    yield Finding("compiled programs", f"{cache}, {len(files)} files, {size}", broken)
    for name, place in (
        ("here", Path.cwd()),
        ("hub cache", Path(HF_HOME)),
        ("temporary files", Path(tempfile.gettempdir())),
    ):
        there = next(each for each in (place, *place.parents) if each.exists())
        free = shutil.disk_usage(there).free
        problem = (
            f"only {format_bytes(free)} of disk is free in {place}: delete something" if free < LITTLE else ""
        )
        if not problem and not writable(place):
            problem = f"{place} cannot be written: " + (
                "set HF_HOME to another directory" if name == "hub cache" else "use another directory"
            )
        yield Finding(name, f"{place}, {format_bytes(free)} free", problem)


def writable(place: Path) -> bool:
    """Return whether a file can be made in a directory, which may still have to be made."""
    there = next(each for each in (place, *place.parents) if each.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
