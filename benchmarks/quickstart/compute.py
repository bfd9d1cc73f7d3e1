"""Run the quickstart in bfloat16, or with adapters instead of all parameters, to compare with float32.

    python benchmarks/quickstart/compute.py float32 bfloat16 adapters [--seeds 0 1 2] [--dir runs/compute]

Prints a line a run and, last, one JSON object; a finished run is found again and not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

STAGES = ("base", "rm", "policy")
# The first stage starts from nothing, where adapters on random weights would learn little.
ADAPTED = ("rm", "policy")
LORA = "{rank = 64, alpha = 128}"
WAYS = {
    "float32": (),
    "bfloat16": tuple(f"{stage}.dtype=bfloat16" for stage in STAGES),
    # Adapters take the larger learning rates that they usually do, and the policy's then has to come down.
    "adapters": (
        *(f"{stage}.lora={LORA}" for stage in ADAPTED),
        "rm.learning_rate=1.5e-3",
        "policy.learning_rate=1.5e-3",
        "policy.scheduler=linear",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ways", nargs="+", choices=tuple(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/compute"))
    arguments = parser.parse_args()
    from rlhf_tools.demo.run import demo

    warnings.simplefilter("ignore")
    found = []
    for seed in arguments.seeds:
        for way in arguments.ways:
            began = time.monotonic()
            summary = demo(arguments.dir / f"{way}-seed{seed}", seed=seed, sets=WAYS[way])
            row = {"way": way, "seed": seed, "seconds": round(time.monotonic() - began, 1)}
            row |= {name: value for name, value in summary.items() if name not in ("artifacts", "found")}
            found.append(row)
            print(json.dumps(row), flush=True)
    print(json.dumps({"runs": found}))


if __name__ == "__main__":
    main()
