"""Run the experiments.

python -m tests.torture                            all of them
python -m tests.torture T1 crash_states --seed 7   these, with another seed
python -m tests.torture --budget 5                 all of them in five minutes, each with its share
python -m tests.torture T1 --case "write 0 state"  one case again, as a failure prints it
python -m tests.torture --list                     what there is
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from tests.torture import shim
from tests.torture.experiment import Failure, Skipped, Trial

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = (
    "saves",
    "pipelines",
    "crash_states",
    "disk_errors",
    "full_disk",
    "damage",
    "two_processes",
    "signals",
    "clocks",
    "grammar",
    "hostile_texts",
    "workers",
    "mutants",
    "soak",
    "rollouts",
    "answers",
    "watching",
)
"""In the order of their numbers, T1 to T17."""
SHOWN = 10


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.torture.experiments.{name}")


def names(asked: list[str]) -> list[str]:
    """Resolve numbers and names of experiments; all of them if none is asked for. Raises ValueError."""
    chosen = []
    for name in asked or EXPERIMENTS:
        by_number = {f"T{i}": known for i, known in enumerate(EXPERIMENTS, 1)}
        known = by_number.get(name.upper(), name)
        if known not in EXPERIMENTS:
            raise ValueError(
                f"no experiment {name!r}; there are T1 to T{len(EXPERIMENTS)}: {', '.join(EXPERIMENTS)}"
            )
        chosen.append(known)
    return chosen


def number(name: str) -> str:
    return f"T{EXPERIMENTS.index(name) + 1}"


def prepare() -> None:
    """Set what every run of an experiment inherits: quick compilation, its caches, and the code of this tree."""
    cache = ROOT / ".cache" / "torture"
    paths = [ROOT, *sorted(path for path in (ROOT / "plugins").iterdir() if path.is_dir())]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    os.environ["RLHF_CACHE"] = str(cache / "data")
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "programs"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [path for path in map(str, paths) if path not in sys.path]


def show(experiment: ModuleType, trial: Trial, seconds: float) -> None:
    """Print an experiment's line and its failures, each with the command that repeats it."""
    bound = f", below {3 / trial.cases:.2g} at 95 %" if trial.cases and not trial.failures else ""
    figures = "".join(f"; {value:,} {name}" for name, value in sorted(trial.counts.items()))
    rest = f"; {trial.unfinished:,} cases left for a larger budget" if trial.unfinished else ""
    print(
        f"{number(trial.name):<4}{trial.name:<15}{len(trial.failures)} failures in {trial.cases:,} cases{bound}"
        f"{figures}{rest}; {seconds:.0f} s",
        flush=True,
    )
    for failure in trial.failures[:SHOWN]:
        print(f"    {failure.case}: {failure.what}".replace("\n", "\n        "))
        print(
            f'    again: make torture EXPERIMENT={number(trial.name)} SEED={trial.seed} CASE="{failure.case}"'
        )
    if len(trial.failures) > SHOWN:
        print(f"    and {len(trial.failures) - SHOWN} more failures")


def commit() -> str:
    """Return the commit, marked where the working tree differs from it; empty without git."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture", description="Try to make the suite lose something."
    )
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help="T1 … or a name; all if none is given"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget", type=float, metavar="MINUTES", help="for all of them together; default: no limit"
    )
    parser.add_argument("--case", help="one case alone, as a failure names it")
    parser.add_argument("--list", action="store_true", help="print the experiments")
    arguments = parser.parse_args()
    try:
        chosen = names(arguments.experiments)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        for name in chosen:
            print(f"{number(name):<4}{name:<15}{(load(name).__doc__ or '').splitlines()[0]}")
        return
    prepare()
    shim.preload()
    sys.exit(run(chosen, arguments))


def run(chosen: list[str], arguments: argparse.Namespace) -> int:
    """Run experiments within the budget; return 1 if one of them found something."""
    from tests.torture.children import import_everything

    print(f"torture of {commit() or 'an exported tree'}, seed {arguments.seed}", flush=True)
    import_everything()
    end = time.monotonic() + 60 * (arguments.budget or 1e6)
    failures: list[Failure] = []
    for i, name in enumerate(chosen):
        experiment = load(name)
        began = time.monotonic()
        left = chosen[i:]
        share = experiment.SHARE / sum(load(each).SHARE for each in left)
        trial = Trial(name, arguments.seed, began + max(0.0, end - began) * share, arguments.case)
        try:
            experiment.run(trial)
        except Skipped as skipped:
            print(f"{number(name):<4}{name:<15}skipped: {skipped}", flush=True)
            continue
        show(experiment, trial, time.monotonic() - began)
        failures += trial.failures
    return int(bool(failures))


if __name__ == "__main__":
    main()
