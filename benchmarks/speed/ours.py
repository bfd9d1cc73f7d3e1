"""Time our suite on one of the works.

    python benchmarks/speed/ours.py --work W1 [--model 50m] [--steps 10]

Runs two processes, the first with an empty cache of compiled programs and the second with what that one left, and
prints one JSON object last. With --one-process it is the second alone, in this process and with the cache that is
set, for profiling.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import machine
import works


def measure(task: works.Task) -> dict[str, Any]:
    """The work in this process, after the settings that a trainer starts with."""
    from rlhf_core import runtime

    runtime.prepare()
    from ours_epoch import run_epoch
    from ours_steps import run_log_probs, run_rollouts, run_trainer, run_updates

    runs: dict[str, Callable[[works.Task], dict[str, Any]]] = {
        "W1": run_updates,
        "W2": run_updates,
        "W3": run_rollouts,
        "W4": run_trainer,
        "W5": run_log_probs,
        "W6": run_epoch,
        "W6hh": run_epoch,
    }
    found = runs[task.work](task)
    return {
        **found,
        "peak_rss_bytes": machine.peak_rss(),
        "matmul_flops_per_second": rate(),
        "versions": works.versions("rlhf-core", "jax", "jaxlib"),
    }


def rate() -> float:
    """The machine's, by a product of float32 matrices in jax."""
    import jax
    import jax.numpy as jnp

    side = jnp.ones((machine.PRODUCT, machine.PRODUCT), jnp.float32)
    product = jax.jit(lambda a, b: jnp.dot(a, b, precision="highest"))
    return machine.product_rate(lambda: product(side, side).block_until_ready())


def report(task: works.Task, found: dict[str, Any]) -> dict[str, Any]:
    """`found` with what the work is, and the share of the machine's products that it reaches."""
    read = [works.Group(*group) for group in found.pop("groups", works.groups(task.work))]
    seconds = found["seconds"]
    flops = works.flops(task.work, task.model, read, task.beta)
    typical = sorted(seconds)[len(seconds) // 2] if seconds else None
    return {
        "work": task.work,
        "model": task.size,
        **({"beta": task.beta} if task.work in ("W2", "W4") else {}),
        "seconds": seconds,
        "tokens": works.tokens(task.work, read),
        "flops": flops,
        "matmul_flops_per_second": found["matmul_flops_per_second"],
        "fraction": flops / typical / found["matmul_flops_per_second"] if typical else None,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time our suite.")
    works.add_arguments(parser)
    parser.add_argument("--one-process", action="store_true", help="neither a cold start nor a fresh cache")
    given = parser.parse_args()
    task = works.task_of(given)
    if given.one_process:
        print(json.dumps(report(task, measure(task))))
        return
    with tempfile.TemporaryDirectory(prefix="speed-") as cache:
        command = [sys.executable, __file__, "--one-process"]
        where = {"JAX_COMPILATION_CACHE_DIR": cache}
        if task.is_epoch:  # timed as a first run has it, compiling included
            row = machine.run([*command, *task.command], where)
            first = None
        else:
            cold = machine.run([*command, *replace(task, steps=0).command], where)
            row = machine.run([*command, *task.command], where)
            first = {"cold": cold["first_step"], "cached": row["first_step"]}
    row.pop("first_step")
    print(json.dumps({**row, "first_step_seconds": first}))


if __name__ == "__main__":
    main()
