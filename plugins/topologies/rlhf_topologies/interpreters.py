"""Find a Python environment with XLA's compiler for a platform, and run this package in it."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from rlhf_core import runtime
from rlhf_core.errors import InputError, RunError
from rlhf_topologies.chips import Topology

PACKAGES = {"gpu": "jax[cuda13]", "tpu": "jax[tpu]"}
"""What pip installs for each platform."""
DOWNLOADS = {"gpu": "4.4 GB", "tpu": "1 GB"}
COMPILERS = {"gpu": "jax_cuda13_plugin", "tpu": "libtpu"}
"""Modules that are installed with the compiler."""
SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no driver
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a metadata server that is not there
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # no TPU is opened, and two checks may run together
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
ASK = """
import importlib.util, json, sys
jax = importlib.util.find_spec("jax") and __import__("jax").__version__
print(json.dumps([list(sys.version_info[:2]), jax, importlib.util.find_spec(sys.argv[1]) is not None]))
"""
STDERR = 2
START = """
import json, site, sys
for path in json.loads(sys.argv[2]):  # after this environment's own, whose jax and compiler come first
    site.addsitedir(path) if path.endswith("-packages") else sys.path.append(path)
from rlhf_topologies.compile import main
main(sys.argv[1])
"""


def variable(platform: str) -> str:
    """Return the environment variable that names the interpreter for a platform."""
    return f"RLHF_{platform.upper()}_PYTHON"


def find(topology: Topology) -> Path:
    """Find the interpreter whose environment has the compiler for these devices.

    Raises InputError with the commands that make one, where there is none or it does not fit the running Python.
    """
    platform = topology.chip.platform
    directory = runtime.cache_root() / "compilers" / platform
    python = "python{}.{}".format(*sys.version_info)
    package = f"{PACKAGES[platform]}=={jax.__version__}"

    def refusal(problem: str) -> InputError:
        install = shlex.join([str(directory / "bin/python"), "-m", "pip", "install", package])
        return InputError(
            f"--on {topology.name}: {problem}. Make an environment for it, once ({DOWNLOADS[platform]}):\n"
            f"  {shlex.join([python, '-m', 'venv', str(directory)])}\n  {install}\n"
            f"or set {variable(platform)} to the Python of one with {package}"
        )

    named = os.environ.get(variable(platform))
    candidate = Path(named).expanduser() if named else directory / "bin/python"
    if not named and not candidate.exists():
        if importlib.util.find_spec(COMPILERS[platform]) is not None:
            return Path(sys.executable)
        raise refusal(f"XLA's {platform.upper()} compiler is not installed")
    where = f"{variable(platform)}={named}" if named else str(candidate)
    try:
        asked = [str(candidate), "-c", ASK, COMPILERS[platform]]
        answer = subprocess.run(
            asked, capture_output=True, text=True, check=True, env=environment_variables()
        )
        version, jax_version, has_compiler = json.loads(answer.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise refusal(f"{where} is not a Python that runs ({error})") from None
    if tuple(version) != sys.version_info[:2]:
        its = ".".join(map(str, version))
        raise refusal(
            f"{where} is Python {its}, and this is {python.removeprefix('python')}, whose packages it would use"
        )
    if jax_version != jax.__version__:
        has = f"jax {jax_version}" if jax_version else "no jax"
        raise refusal(f"{where} has {has}, not {jax.__version__}")
    if not has_compiler:
        raise refusal(f"{where} has no {COMPILERS[platform]}")
    return candidate


def run(python: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run `rlhf_topologies.compile` on a job in another environment; return its results.

    The environment's own packages come first on its path, then those of this process. Raises RunError where it ends
    without results; InputError with the problems that it finds.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf-compile-") as directory:
        file, results, messages = (Path(directory) / name for name in ("job.json", "results.json", "stderr"))
        file.write_text(json.dumps({**job, "results": str(results)}), encoding="utf-8")
        with messages.open("wb") as stderr:
            code = subprocess.run(
                [python, "-c", START, str(file), json.dumps(import_paths())],
                env=environment_variables(),
                stdout=STDERR,  # its progress
                stderr=stderr,  # where compilers talk of what is not there
            ).returncode
        if not results.exists():
            last = messages.read_text(encoding="utf-8", errors="replace").strip()[-3000:]
            raise RunError(f"the compiler's process ended with code {code}:\n{last}")
        written: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    if "problems" in written:
        raise InputError(*written["problems"])
    return written


def import_paths() -> list[str]:
    """Return this process's import paths, without its standard library."""
    library = {str(Path(os.__file__).parent), str(Path(os.__file__).parent / "lib-dynload")}
    paths = [path or os.getcwd() for path in sys.path]
    return [path for path in paths if path not in library and Path(path).is_dir()]


def environment_variables() -> dict[str, str]:
    """Return this process's variables without those that would change the other's imports or devices."""
    left_out = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    return {name: value for name, value in os.environ.items() if name not in left_out} | SETTINGS
