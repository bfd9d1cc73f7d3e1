"""Measure how far the sampler's log-probabilities are from the trainer's, over the rollouts of finished runs.

    python benchmarks/quickstart/distance.py RUN… [--stage policy]

A run is one of the quickstart, `rlhf demo`, or any other with a stage that samples and no rollouts ahead. Prints the
mean, the 99.9th percentile and the largest |trainer − sampler|, nats per token, of the first rollout and of all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlhf_core.runs import open_run


def distances(run: Path, name: str) -> list[NDArray[np.float64]]:
    """Return |trainer − sampler| of the sampled tokens of each rollout, nats."""
    (stage,) = [each for each in open_run(run).stages if each.name == name]
    found = []
    for rollout, _, _ in stage.rollouts():
        with np.load(stage.dir / "values" / f"{rollout.number:06d}.npz") as file:
            trainer = file["trainer_logps"].astype(np.float64)
        found.append(np.abs(trainer - rollout.samples.logps[rollout.samples.mask]))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--stage", default="policy")
    given = parser.parse_args()
    print("| run | rollouts | tokens | mean | 99.9 % below | largest |\n|---|---:|---:|---:|---:|---:|")
    for run in given.runs:
        every = distances(run, given.stage)
        for count in dict.fromkeys((1, len(every))):
            apart = np.concatenate(every[:count])
            numbers = f"{apart.mean():.2g} | {np.quantile(apart, 0.999):.2g} | {apart.max():.2g}"
            print(f"| {run.name} | {count} | {len(apart):,} | {numbers} |")


if __name__ == "__main__":
    main()
