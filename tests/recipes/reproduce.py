"""Run recipes and hold their metrics against the stored intervals, as `make reproduce` does.

    python tests/recipes/reproduce.py                        every recipe, two at a time, with seed 0
    python tests/recipes/reproduce.py dapo resume --seed 7   two of them, with another seed
    python tests/recipes/reproduce.py dapo --record 20       store new intervals, from seeds 0 to 19
    python tests/recipes/reproduce.py dapo --rounding 2      store what rounding alone does to seeds 0 and 1

Exit code 0: every metric of every recipe is inside its interval; 1: one is not, or a run failed; 2: no such recipe.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import intervals
import measures
from recipes import HERE, RECIPES, Again, Recipe

STORED = HERE / "intervals"
RUN = "from rlhf_core.cli import main; main()"
MACHINES = {
    "128 bits": {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
    "256 bits": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    "512 bits": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX512 --xla_cpu_prefer_vector_width=512"},
    "one thread": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
}
"""Processors that compute the same with another rounding: {what they are: environment variables that make them}."""
ENDED = 1200.0
"""Seconds after which a second run is given up."""


def run(recipe: Recipe, directory: Path, seed: int) -> dict[str, float]:
    """Run a recipe in an empty directory; its metrics."""
    from rlhf_core import run_pipeline

    pipeline = recipe.write(directory, seed)
    sets = [f"seed={seed}", *recipe.sets]
    run_pipeline(pipeline, sets=sets, dir=directory / "run")
    metrics = measures.measured(directory / "run", directory / "data", recipe.stages)
    if recipe.again is not None:
        run_again(
            recipe.again, pipeline, [*sets, *recipe.again.sets], directory / "again", recipe.compared[-1]
        )
        metrics |= measures.differences(directory / "run", directory / "again", recipe.compared)
    return metrics


def run_again(again: Again, pipeline: Path, sets: list[str], directory: Path, last: str) -> None:
    """The second run, in a process of its own; it is killed after an update of the last stage where that is asked."""
    arguments = [str(pipeline), "--dir", str(directory), *(f"--set={each}" for each in sets)]
    command = [sys.executable, "-c", RUN, "run", *arguments]
    with (directory.parent / "again.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        if again.killed_after is not None:
            kill_after(again.killed_after, process, directory / last / "metrics.jsonl")
            process = subprocess.Popen(command, stdout=log, stderr=log)
        if process.wait(ENDED) != 0:
            raise RuntimeError(f"the second run ended with {process.returncode}: see {log.name}")


def kill_after(update: int, process: subprocess.Popen[bytes], metrics: Path) -> None:
    """Kill a process once a stage has logged this update."""
    until = time.monotonic() + ENDED
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            if metrics.read_bytes().count(b"\n") >= update:
                break
        time.sleep(0.01)
    if process.poll() is not None:
        raise RuntimeError(f"the run to be killed had ended, with {process.returncode}")
    process.send_signal(signal.SIGKILL)
    process.wait()


def child(name: str, seeds: list[int], keep: Path | None) -> None:
    """Run a recipe with each seed and print {seed: metrics} as the last line."""
    import jax

    warnings.simplefilter("ignore")
    found = {}
    for seed in seeds:
        directory = (
            Path(tempfile.mkdtemp(prefix=f"recipe-{name}-")) if keep is None else keep / name / f"seed{seed}"
        )
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        with contextlib.redirect_stdout(sys.stderr):
            found[seed] = run(RECIPES[name], directory, seed)
        if keep is None:
            shutil.rmtree(directory)
        jax.clear_caches()
    print(json.dumps(found))


def run_in_process(
    name: str, seeds: list[int], keep: Path | None, machine: Mapping[str, str] | None = None
) -> tuple[dict[int, dict[str, float]], str, float]:
    """({seed: metrics}, what went wrong, seconds) of a recipe that a process of its own has run.

    machine: one of `MACHINES`; None: this one as it is.
    """
    began = time.monotonic()
    command = [sys.executable, __file__, name, "--child", *map(str, seeds)]
    if keep is not None:
        command += ["--dir", str(keep)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(RECIPES[name].devices)} | dict(machine or {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        return {}, done.stderr[-2000:], seconds
    found = json.loads(done.stdout.splitlines()[-1])
    return {int(seed): metrics for seed, metrics in found.items()}, "", seconds


def stored_file(name: str) -> Path:
    return STORED / f"{RECIPES[name].held_to or name}.json"


def check(name: str, seed: int, keep: Path | None) -> bool:
    """Run a recipe, print whether it passed, and return it."""
    found, error, seconds = run_in_process(name, [seed], keep)
    if error:
        print(f"{name:<12} failed   {seconds:4.0f} s\n{error}", flush=True)
        return False
    if not (stored := stored_file(name)).exists():
        print(
            f"{name:<12} has no intervals; store them with --record {intervals.FEWEST_SEEDS} or more",
            flush=True,
        )
        return False
    record = intervals.read(stored)
    if RECIPES[name].again is None:  # the recipe that was recorded may have had a second run
        kept = {
            metric: each for metric, each in record.intervals.items() if not metric.endswith("/difference")
        }
        record = record._replace(intervals=kept)
    problems = intervals.outside(found[seed], record, seed)
    state = "left its intervals" if problems else "passed"
    lines = [f"{name:<12} {state}   {seconds:4.0f} s   {len(found[seed])} metrics"]
    lines += [f"    {metric} {problem}" for metric, problem in problems.items()]
    print("\n".join(lines), flush=True)
    return not problems


def record(name: str, seeds: list[int], keep: Path | None) -> bool:
    """Run a recipe with several seeds and store the intervals of its metrics."""
    found, error, seconds = run_in_process(name, seeds, keep)
    if error:
        print(f"{name:<12} failed   {seconds:4.0f} s\n{error}", flush=True)
        return False
    made = {
        metric: intervals.interval(
            [values[metric] for values in found.values() if metric in values],
            intervals.SCALES[measures.scale_of(metric)],
        )
        for metric in sorted(set().union(*found.values()))
    }
    again = {
        metric: [values[metric] for values in found.values()]
        for metric in made
        if measures.repeats(metric, RECIPES[name].trainers)
        and all(metric in values for values in found.values())
    }
    versions = {package: version(package) for package in ("jax", "optax", "numpy", "transformers")}
    intervals.write(
        STORED / f"{name}.json",
        intervals.Record(made, again),
        seeds=len(seeds),
        level=intervals.LEVEL,
        versions=versions,
    )
    print(f"{name:<12} recorded {seconds:4.0f} s   {len(made)} metrics of {len(seeds)} seeds", flush=True)
    return True


def measure_rounding(name: str, seeds: list[int]) -> bool:
    """Run a recipe as other machines would compute it, and store how far that moves what must come again."""
    record = intervals.read(stored_file(name))
    largest = dict.fromkeys(record.values, 0.0)
    for machine, settings in MACHINES.items():
        found, error, seconds = run_in_process(name, seeds, None, settings)
        if error:
            print(f"{name:<12} failed   {seconds:4.0f} s   {machine}\n{error}", flush=True)
            return False
        for metric, values in record.values.items():
            apart = [abs(found[seed][metric] - values[seed]) for seed in seeds]
            largest[metric] = max(largest[metric], *apart)
        print(f"{name:<12} measured {seconds:4.0f} s   {machine}", flush=True)
    file = stored_file(name)
    kept = json.loads(file.read_text(encoding="utf-8"))
    about = {key: kept[key] for key in ("seeds", "level", "versions")}
    intervals.write(file, record._replace(rounding=largest), **about)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run recipes and compare what they learn with stored intervals."
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="all of them, if none is named")
    parser.add_argument("--seed", type=int, default=0, help="of data, weights, order and samples")
    parser.add_argument("--jobs", type=int, default=2, help="recipes that run at a time")
    parser.add_argument("--dir", type=Path, help="keep the runs here, RECIPE/seedN; else they are deleted")
    parser.add_argument(
        "--record",
        type=int,
        metavar="SEEDS",
        help="store intervals, from this many seeds",
    )
    parser.add_argument(
        "--rounding",
        type=int,
        metavar="SEEDS",
        help="store what other vector widths and one thread change, from this many of the recorded seeds",
    )
    parser.add_argument("--list", action="store_true", help="print the recipes")
    parser.add_argument("--child", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.recipes or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"no recipe {unknown[0]!r}; there are {', '.join(RECIPES)}")
    if arguments.list:
        print("\n".join(f"{name:<12} {RECIPES[name].about}" for name in names))
        return
    if arguments.child:
        child(names[0], arguments.child, arguments.dir)
        return
    if arguments.record is not None and arguments.record < intervals.FEWEST_SEEDS:
        parser.error(
            f"--record {arguments.record}: an interval needs {intervals.FEWEST_SEEDS} seeds at least"
        )
    if arguments.record is not None:
        if held := [name for name in arguments.recipes if RECIPES[name].held_to]:
            parser.error(f"{held[0]} has no intervals of its own: --record {RECIPES[held[0]].held_to}")
        names = [name for name in names if not RECIPES[name].held_to]
    if arguments.rounding is not None:
        names = [name for name in names if not RECIPES[name].held_to]
    began = time.monotonic()
    how = "passed"
    with ThreadPoolExecutor(arguments.jobs) as pool:
        if arguments.record is not None:
            how = "recorded"
            done = list(
                pool.map(lambda name: record(name, list(range(arguments.record)), arguments.dir), names)
            )
        elif arguments.rounding is not None:
            how = "measured"
            done = list(pool.map(lambda name: measure_rounding(name, list(range(arguments.rounding))), names))
        else:
            done = list(pool.map(lambda name: check(name, arguments.seed, arguments.dir), names))
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"{sum(done)} of {len(done)} recipes {how} in {minutes}:{seconds:02d}")
    sys.exit(not all(done))


if __name__ == "__main__":
    main()
