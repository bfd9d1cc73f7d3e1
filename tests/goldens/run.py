"""A golden pipeline, run in a directory of its own, and what came of it: what is compared.

Values that differ between two runs of one version are masked by `masked` and left out by `PASSING`; nothing else is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens import inputs
from tests.goldens.pipelines import GOLDENS, Golden

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PASSING = re.compile(
    r"time|seconds|tokens_per_second|memory|rollout/wait|sync/|ahead/|^date$|updates_per_second"
)
"""Names of metrics and of fields in files that tell how long something took, or how much memory a process had."""
NUMBER = r"\d[\d,]*(?:\.\d+)?"
MASKS = (
    # A date with its time stands before a time alone, which is a part of it.
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d[\d:.+Z-]*|run-\d{8}_\d{6}-\w+"), "DATE"),
    # A time left, a duration, a rate: the machine's.
    (re.compile(rf"\b{NUMBER}[kM]? tok/s( +\d+:\d\d(:\d\d)? left)?"), "N tok/s"),
    (re.compile(r"\b\d+:\d\d(:\d\d)?\b"), "TIME"),
    (re.compile(rf"held up to {NUMBER} \wB"), "held up to N"),
    (re.compile(rf"forecast was about {NUMBER} \wB"), "forecast was about N"),
    (re.compile(rf"\b(in|after|for|about) {NUMBER} (s|ms)\b"), r"\1 N s"),
    # Memory of the process, and the sums that it is part of.
    (re.compile(rf"memory about {NUMBER} \wB in all"), "memory about N in all"),
    (re.compile(rf"process {NUMBER} \wB"), "process N"),
    (re.compile(rf"{NUMBER} (MB|GB) (of|free|in use)\b"), r"N \1 \2"),
    # What only this process is called, or depends on where it runs.
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"\bpid \d+"), "pid N"),
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "HASH"),
)
BARS = re.compile(r"\[\w+\] compiling, for .*|.*Programs compile for.*|\[transformers\] .*")
"""Lines that come only where a program takes long to compile, or from another library."""


def masked(text: str, places: dict[str, str]) -> list[str]:
    """Return a printed text's lines without what differs between two runs of one version.

    places: {path: the word that it becomes}. Paths, times, rates, the memory of a process, addresses, hashes and dates
    are masked; numbers of the training never are.
    """
    for path, word in places.items():
        text = text.replace(path, word)
    for pattern, word in MASKS:
        text = pattern.sub(word, text)
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if not BARS.fullmatch(line)]


def run(name: str, directory: Path, root: Path = ROOT, python: str = sys.executable) -> dict[str, Any]:
    """Run a golden pipeline with the code in `root`, and return what came of it.

    Raises AssertionError where a command ends with another exit code than it should.
    """
    golden = GOLDENS[name]
    directory.mkdir(parents=True)
    inputs.write(directory)
    toml = golden.toml
    environment = _environment(golden, directory, root)
    if not golden.serves:
        (directory / "p.toml").write_text(toml)
        ended = _run(golden, directory, root, python, environment)
    else:
        from tests.goldens.serving import served

        with served(directory, python, environment) as url:
            (directory / "p.toml").write_text(toml.replace("URL", url))
            ended = _run(golden, directory, root, python, environment)
    for number, each in enumerate(ended):
        expected = golden.ends.get(number, 0)
        assert each["code"] == expected, f"{name}: exit code {each['code']}, {each['out']}{each['err']}"
    return result(golden, directory, root, ended)


def _environment(golden: Golden, directory: Path, root: Path) -> dict[str, str]:
    packages = [root, *sorted(path for path in (root / "plugins").iterdir() if path.is_dir())]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(golden.devices),
        "RLHF_CACHE": str(directory / "cache"),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        # Where lines are wrapped would depend on the length of the directory's path.
        "COLUMNS": "10000",
    }


def _run(golden: Golden, directory: Path, root: Path, python: str, environment: dict[str, str]) -> list[Any]:
    commands = [each.replace("ROOT", str(root)) for each in golden.commands]
    job = [environment]
    if golden.processes > 1:
        from tests.goldens.serving import free_port

        address = f"127.0.0.1:{free_port()}"
        job = [
            {
                **environment,
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(golden.processes),
                "JAX_PROCESS_ID": str(number),
            }
            for number in range(golden.processes)
        ]
    outs = [directory / f"ended-{number}.json" for number in range(len(job))]
    children = [
        subprocess.Popen(
            [python, str(HERE / "child.py"), str(out), *commands],
            cwd=directory,
            env=each,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for each, out in zip(job, outs, strict=True)
    ]
    printed = [child.communicate()[0] for child in children]
    for out, text in zip(outs, printed, strict=True):
        assert out.exists(), text
    ended: list[Any] = json.loads(outs[0].read_text())
    return ended


def result(golden: Golden, directory: Path, root: Path, ended: list[Any]) -> dict[str, Any]:
    """Return what is compared: what was printed, the rows of files, and the hashes and sizes of artifacts."""
    places = {str(directory.resolve()): "DIR", str(directory): "DIR", str(root): "ROOT"}
    printed = {
        f"{number} rlhf {command}": [
            f"exit code {each['code']}",
            *masked(each["out"], places),
            "-- errors",
            *masked(each["err"], places),
        ]
        for number, (command, each) in enumerate(zip(golden.commands, ended, strict=True))
    }
    rows = {
        path.relative_to(directory).as_posix(): [_without_passing(row, places) for row in _rows(path)]
        for path in sorted(directory.rglob("*"))
        if path.suffix in (".jsonl", ".json") and _is_compared(path.relative_to(directory))
    }
    artifacts = {
        path.relative_to(directory).as_posix(): _tensors(path)
        for path in sorted(directory.rglob("*.safetensors"))
    }
    return {"printed": printed, "files": list(_files(directory)), "rows": rows, "artifacts": artifacts}


def _files(directory: Path) -> Iterator[str]:
    """Yield the files and checkpoints of a run directory; what is in a checkpoint or a logger's folder is theirs."""
    for path in sorted((directory / "run").rglob("*")):
        inside = path.relative_to(directory).parts
        if "wandb" in inside[:-1] or "checkpoints" in inside[:-2]:
            continue
        if path.is_file() or inside[-2] == "checkpoints":
            yield "/".join(inside)


def _is_compared(path: Path) -> bool:
    """Check whether a file has what a stage computed: metrics, completions, evaluations, weights, scores."""
    if path.name in ("out.jsonl", "scores.jsonl"):
        return True
    names = ("metrics.jsonl", "weights.jsonl")
    folders = ("samples", "evaluations")
    return path.parts[0] == "run" and (path.name in names or path.parent.name in folders)


def _rows(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    return [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def _without_passing(value: Any, places: dict[str, str]) -> Any:
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not PASSING.search(key)}
        return {key: _without_passing(each, places) for key, each in kept.items()}
    if isinstance(value, list):
        return [_without_passing(each, places) for each in value]
    for place, word in places.items() if isinstance(value, str) else ():
        value = value.replace(place, word)
    return value


def _tensors(path: Path) -> dict[str, Any]:
    """Return a hash of a file's tensors, and a sum of squares that other processors get to a tolerance."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    digest, squares = hashlib.sha256(), 0.0
    for name in sorted(header):
        begin, end = (8 + length + at for at in header[name]["data_offsets"])
        digest.update(f"{name} {header[name]['dtype']} {header[name]['shape']}".encode() + content[begin:end])
        if header[name]["dtype"] == "F32":
            squares += float(
                np.square(np.frombuffer(content[begin:end], np.float32).astype(np.float64)).sum()
            )
    return {"hash": digest.hexdigest(), "squares": squares}


DIFFERENCES = ("/chosen", "/rejected", "/margins", "/advantage")
"""Rewards of DPO and KTO, which are differences of sums of tens of nats, whose own float32 is as coarse as 4e-6; and
advantages, which are differences of rewards over their deviation."""
WIDER = {"/gemma/metrics.jsonl[0]/grad_norm": 2.0}
"""A number that the fifth generation of Xeon rounds differently from all processors before it, by 1.4e-5 of it, with
how many times the tolerance it has."""


def differences(one: Any, other: Any, tolerance: float = 0.0, where: str = "") -> Iterator[str]:
    """Yield where two results differ: numbers by more than `tolerance`, relative to the larger of them and 0.1.

    Below 0.1 the rounding of float32 sums counts and not the size of the number; of `DIFFERENCES` below 0.5. With a
    tolerance, hashes are not compared, nor what is rounding itself: how far two programs' log-probabilities differ, and
    the signs of the rewards of a policy that is still its reference.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if tolerance and (key == "hash" or "logp_difference" in key):
                continue
            if tolerance and key == "rewards/accuracies" and where.endswith("metrics.jsonl[0]"):
                continue
            if key not in one or key not in other:
                yield f"{where}/{key}: only in the {'first' if key in one else 'second'}"
            else:
                yield from differences(one[key], other[key], tolerance, f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} entries"
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, tolerance, f"{where}[{i}]")
    elif isinstance(one, str) and isinstance(other, str) and tolerance:
        yield from _text_differences(one, other, tolerance, where)
    elif _are_numbers(one, other):
        allowed = tolerance * next((times for end, times in WIDER.items() if where.endswith(end)), 1.0)
        least = 0.5 if where.endswith(DIFFERENCES) else 0.1
        if abs(one - other) > allowed * max(abs(one), abs(other), least) and one == one:
            yield f"{where}: {one!r} and {other!r}"
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"


def _are_numbers(one: Any, other: Any) -> bool:
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))


def _text_differences(one: str, other: str, tolerance: float, where: str) -> Iterator[str]:
    """Compare texts whose numbers were rounded for people: one unit of the last digit may differ."""
    numbers = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
    if numbers.sub("N", one) != numbers.sub("N", other):
        yield f"{where}: {one!r} and {other!r}"
        return
    for a, b in zip(numbers.findall(one), numbers.findall(other), strict=True):
        unit = 10.0 ** -len(a.partition("e")[0].partition(".")[2]) * float(
            "1e" + (a.partition("e")[2] or "0")
        )
        if abs(float(a) - float(b)) > max(1.01 * unit, 0.1 * tolerance):
            yield f"{where}: {a} and {b} in {one!r}"
