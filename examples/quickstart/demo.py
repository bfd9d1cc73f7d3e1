"""Run the quickstart and print its results: `make demo`, or `python examples/quickstart/demo.py`.

One run directory a seed, `runs/quickstart-seed0`, holds the data, the pipeline file and every stage.
Interrupted, the same command goes on; finished, it prints the table again and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generate import Sizes, generate, settings
from rich.console import Console
from table import closing_table

HERE = Path(__file__).resolve().parent
STAGES = ("base", "rm", "policy")


def prepare(directory: Path, seed: int, shuffle_labels: bool, sizes: Sizes) -> Path:
    """Write data and pipeline file into the run directory, if missing; return the pipeline file."""
    from rlhf_core.artifacts import write_atomic
    from rlhf_core.errors import InputError

    written = directory / "data" / "data.json"
    if not written.exists():
        generate(directory / "data", seed=seed, shuffle_labels=shuffle_labels, sizes=sizes)
    elif json.loads(written.read_text()) != settings(seed, shuffle_labels, sizes):
        raise InputError(f"{written} has other settings than this run; delete {directory} to start anew")
    pipeline = directory / "quickstart.toml"
    write_atomic(pipeline, (HERE / "quickstart.toml").read_bytes())
    return pipeline


def demo(
    directory: Path,
    *,
    seed: int,
    shuffle_labels: bool = False,
    sizes: Sizes | None = None,
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Run or find the pipeline in `directory` and return its figures, which `summary.json` there keeps.

    sets: changes to the pipeline file, as `rlhf run --set` takes them.
    """
    from rlhf_core import artifacts, run_pipeline

    pipeline = prepare(directory, seed, shuffle_labels, sizes or Sizes())
    results = run_pipeline(
        pipeline, sets=[f"seed={seed}", *sets], plugins=[HERE / "stopwatch.py"], dir=directory
    )
    made = {stage: artifacts.identity(results.stages[stage].artifacts["model"].path) for stage in STAGES}
    file = directory / "summary.json"
    if file.exists() and (summary := json.loads(file.read_text()))["artifacts"] == made:
        return {**summary, "found": True}

    from measure import measure

    began = time.monotonic()
    summary = {"artifacts": made, "seed": seed, "shuffle_labels": shuffle_labels}
    summary |= measure(directory, directory / "data", seed)
    clocks = {stage: directory / stage / "wall_time.json" for stage in STAGES}
    summary["seconds"] = {stage: json.loads(clock.read_text())["seconds"] for stage, clock in clocks.items()}
    summary["seconds"]["measuring"] = round(time.monotonic() - began, 2)
    artifacts.write_atomic(file, json.dumps(summary, indent=2) + "\n")
    return {**summary, "found": False}


def main() -> None:
    """Run the demo; exit codes are those of `rlhf run`."""
    parser = argparse.ArgumentParser(
        description="SFT, a reward model and GRPO on made-up orders, then a table."
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data and of all stages")
    parser.add_argument("--shuffle-labels", action="store_true", help="random preferences: a control")
    arguments = parser.parse_args()
    from rlhf_core.errors import InputError, RunError, Stopped

    warnings.formatwarning = lambda message, *_: f"{message}\n"  # without the place in the code
    name = f"quickstart-seed{arguments.seed}{'-shuffled' if arguments.shuffle_labels else ''}"
    directory = Path("runs") / name
    try:
        summary = demo(directory, seed=arguments.seed, shuffle_labels=arguments.shuffle_labels)
    except (InputError, RunError, Stopped) as error:
        print(error, file=sys.stderr)
        sys.exit({InputError: 2, RunError: 1, Stopped: 75}[type(error)])
    Console(highlight=False).print(closing_table(summary, directory))


if __name__ == "__main__":
    main()
