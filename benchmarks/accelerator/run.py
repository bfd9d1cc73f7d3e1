"""Measure this suite on one accelerator, in at most eight minutes, beside what its compiler said without one.

    python benchmarks/accelerator/run.py --out results.jsonl

Needs jax for the device and the wheels that `--prepare DIR` collects; README.md says how.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PATHS = [REPOSITORY, *sorted(REPOSITORY.glob("plugins/*")), HERE]
SECONDS = 480
WHEELS = """
absl-py annotated-types etils flax humanize importlib-resources markdown-it-py mdurl msgpack nest-asyncio optax
orbax-checkpoint packaging pluggy protobuf psutil pydantic pydantic-core pygments pyyaml rich safetensors simplejson
tensorstore tqdm treescope typing-extensions typing-inspection
"""
"""What the benchmark imports besides jax, and what that needs."""
PLATFORMS = ("2_28", "2_27", "2_17")
GOLDEN = ("config.json", "model.safetensors", "golden.npz")
COLUMNS = {
    "seconds": "seconds",
    "forward_seconds": "forward",
    "expected_seconds": "at least",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "bandwidth": "bandwidth",
    "memory_analysis_bytes": "memory GB",
    "expected_bytes": "expected",
    "peak_bytes": "peak GB",
    "error": "error",
}


def prepare(directory: Path, golden: Path | None) -> None:
    """Collect wheels for the Python 3.12 of the device's machine, and the golden files if there are any.

    The newest, not those of constraints.txt: jax may be newer there, and flax 0.12.8 cannot be imported with jax 0.11.
    """
    wheels = directory / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(wheels)]
    command += [part for each in PLATFORMS for part in ("--platform", f"manylinux_{each}_x86_64")]
    subprocess.run([*command, "--platform", "manylinux2014_x86_64", *WHEELS.split()], check=True)
    for source in golden.iterdir() if golden is not None else ():
        if not all((source / name).is_file() for name in GOLDEN):
            continue
        folder = directory / "golden" / source.name
        folder.mkdir(parents=True, exist_ok=True)
        for name in GOLDEN:
            shutil.copyfile(source / name, folder / name)
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    print(f"{size / 2**20:.1f} MiB in {directory}")


class Results:
    """Rows on the terminal and in a JSON lines file, each as soon as it is known."""

    def __init__(self, out: Path | None, predicted: dict[str, Any]) -> None:
        self.out, self.predicted = out, predicted

    def add(self, row: dict[str, Any]) -> None:
        """Print and write a row, beside the prediction of its name."""
        if (stage := self.predicted.get(row.get("name", ""))) is not None:
            row["expected_seconds"] = sum(p["calls"] * p["seconds"] for p in stage["programs"])
            row["expected_bytes"] = max(p["peak"] for p in stage["programs"])
        print(line(row), flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def line(row: dict[str, Any]) -> str:
    """Format a row as a line of the table; a failure, or what was left out, as its reason."""
    start = f"{row['name']:<24}"
    if isinstance(row.get("error"), str) or "skipped" in row:
        return f"{start} {row.get('skipped') or 'failed: ' + row['error']}"
    cells = [_cell(name, row[name]) for name in COLUMNS if row.get(name) is not None]
    rest = [f"{name} {value}" for name, value in row.items() if name in ("differing_arrays", "passed")]
    return f"{start} {'  '.join([*cells, *rest])}"


def _cell(name: str, value: float) -> str:
    return f"{COLUMNS[name]} {value / 1e9 if name.endswith('_bytes') else value:,.4g}"


def heading() -> dict[str, Any]:
    """Describe what runs, without touching the device."""
    git = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return {
        "name": "run",
        "skipped": f"commit {commit or 'unknown'}, " + ", ".join(f"{k} {v}" for k, v in versions.items()),
        "commit": commit or None,
        "versions": versions,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def run_part(name: str, given: argparse.Namespace) -> None:
    """Run one part in this process."""
    import jax
    from parts import Context, parts
    from programs import Bench
    from rlhf_topologies.chips import CHIPS, parse
    from sizes import FULL, TINY

    from rlhf_core.errors import error_line
    from rlhf_core.mesh import make_mesh

    device = jax.devices()[0]
    kind = device.device_kind.lower()
    chip = next((chip for chip in CHIPS if chip in kind), "h100")
    predicted = HERE / f"predicted_{chip}.json"
    stages = json.loads(predicted.read_text(encoding="utf-8"))["stages"] if predicted.exists() else {}
    sizes = TINY if given.tiny else FULL
    results = Results(given.out, {} if given.tiny else stages)
    bench = Bench(sizes, make_mesh(devices=[device]))
    topology = parse(
        f"{chip}:1" if CHIPS[chip].platform == "gpu" else f"{chip}:{'1x1x1' if chip == 'v5p' else '1x1'}"
    )
    context = Context(bench, topology, given.golden, on_cpu=device.platform == "cpu")
    began = time.perf_counter()
    where = {"part": name, "device": device.device_kind}
    try:
        for row in parts(sizes.models)[name][1](context):
            results.add({**row, **where, "at": time.perf_counter() - began})
    except Exception as error:
        results.add({"name": name, "error": error_line(error), **where, "at": time.perf_counter() - began})


def start_part(name: str, given: argparse.Namespace, seconds: float) -> None:
    """Run a part in a process of its own, whose memory is then free again, and which is ended when its time is up."""
    command = [sys.executable, __file__, "--only", name]
    command += ["--out", str(given.out)] if given.out else []
    command += ["--golden", str(given.golden)] if given.golden else []
    command += ["--tiny"] if given.tiny else []
    try:
        code = subprocess.run(command, timeout=seconds, check=False).returncode
        reason = f"its process ended with exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        reason = f"stopped after {seconds:.0f} seconds"
    if reason is not None:
        Results(given.out, {}).add({"name": name, "error": reason, "part": name})


def run(given: argparse.Namespace) -> None:
    """Run the parts, most valuable first, until the time is up."""
    from parts import parts
    from sizes import FULL, TINY

    began = time.perf_counter()
    Results(given.out, {}).add(heading())
    every = parts((TINY if given.tiny else FULL).models)
    for name, (seconds, _) in every.items():
        left = given.seconds - (time.perf_counter() - began)
        if given.parts and name not in given.parts:
            continue
        if left <= 0:
            Results(given.out, {}).add({"name": name, "skipped": "no time was left"})
        elif given.tiny:
            run_part(name, given)
        else:
            start_part(name, given, min(seconds, left))


def main(arguments: Sequence[str] | None = None) -> None:
    sys.path[:0] = [str(path) for path in PATHS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), help="names with commas; default: all")
    parser.add_argument("--out", type=Path, help="a JSON lines file, written after every row")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, in one process")
    parser.add_argument("--golden", type=Path, help="directory of golden files, one folder per model family")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="collect what must be carried, and end")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.prepare:
        prepare(given.prepare, given.golden)
        return
    # One process compiles what another finds; and a rollout beside a training state takes most of the memory.
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "accelerator-programs")
    )
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if given.only:
        run_part(given.only, given)
    else:
        run(given)


if __name__ == "__main__":
    main()
