"""Compile the programs of one case and count what they do; the step itself never runs.

    python benchmarks/growth/measure.py '{"axis": "group", "work": "W2", "group": 8}'

prints one JSON object last. A process measures one case: how many devices it has, and the sizes of benchmarks/speed,
which it sets, are those of the case.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from cases import SMALL, SPEED, Case
from rlhf_grpo.train import PolicyReader
from rlhf_topologies.hlo import Counts, count

from rlhf_core.mesh import abstract_rows, make_mesh
from rlhf_core.models.attention import block_size
from rlhf_core.packing.rows import pack
from rlhf_core.rollouts.rollout_rows import longest_groups
from rlhf_core.step import Programs

sys.path.insert(0, str(SPEED))
import ours_steps
import works


def build(case: Case, directory: Path) -> tuple[Any, Any, Any, Any]:
    """(objective, updates, state, packed rows of one update), as the benchmark of the same work makes them."""
    works.MODELS["1m"] = works.Model(*SMALL)
    works.PAIRS, works.PAIR_TOKENS = case.pairs, case.length
    works.PROMPTS, works.GROUP, works.PROMPT, works.COMPLETION = (
        case.prompts,
        case.group,
        case.prompt,
        case.completion,
    )
    ours_steps.make_mesh = partial(make_mesh, case.data, case.fsdp, case.tensor)
    task = works.Task(case.work, case.model, works.BETA, 0, None, None)
    if case.work == "W1":
        objective, updates, state = ours_steps.reward_update(task, directory)
        return objective, updates, state, updates.update(0).batches
    PolicyReader.compile = lambda self, shapes: None  # compiled below, once
    objective, updates, state = ours_steps.policy_update(task, directory)
    sizes = np.full(case.prompts, case.prompt)
    groups = longest_groups(updates.steps.config, sizes, group=case.group, length=case.completion)
    return objective, updates, state, pack(groups, updates.layout)


def visits(attention: Any, batches: list[Any]) -> float:
    """Blocks of keys that a block of queries visits in `blockwise`, on average: how often its inner loops run."""
    time = batches[0].rows.tokens.shape[1]
    block = getattr(attention, "keywords", {}).get("block") or block_size(time)
    count = -(-time // block)
    start = np.arange(count) * block
    visited = 0
    for batch in batches:
        until = np.pad(np.asarray(batch.rows.visible_until), ((0, 0), (0, count * block - time)))
        last = until.reshape(len(until), count, block).max((0, 2))
        visited += int(((last > start[:, None]) & (start <= start[:, None])).sum())
    return visited / (count * len(batches))


def measure(case: Case) -> dict[str, Any]:
    """Count a device's work per step, and the memory of its programs."""
    jax.config.update("jax_num_cpu_devices", case.devices)
    with tempfile.TemporaryDirectory(prefix="growth-") as directory:
        objective, updates, state, packed = build(case, Path(directory))
    programs, mesh = Programs(objective, state), state.step.sharding.mesh
    total, parts, temporary, arguments = Counts(), {}, 0, 0

    def add(name: str, lowered: Any, times: int, trips: float) -> Any:
        nonlocal temporary, arguments
        compiled = lowered.compile()
        found = count(compiled.as_text(), trips)
        total.add(found, times)
        parts[name] = parts.get(name, 0.0) + times * found.flops
        memory = compiled.memory_analysis()
        temporary = max(temporary, memory.temp_size_in_bytes)
        arguments = max(arguments, memory.argument_size_in_bytes)

    rows = Counter(batch.rows.tokens.shape for batch in packed)
    attention, done = state.model.attention, None
    for empty in updates.shapes():
        shape = empty.rows.tokens.shape
        batch, times = abstract_rows(mesh, empty), rows[shape]
        if not times:
            continue
        trips = visits(attention, [each for each in packed if each.rows.tokens.shape == shape])
        lowered = programs._accumulate.lower(state.params, batch, None, None)
        done = lowered.out_info
        add("accumulate", lowered, times, trips)
        if case.work == "W2":
            reading = updates.steps.policies.reading
            add("reference", reading.reader.lower(reading.params(state.params), batch), times, trips)
    add("apply", programs._apply.lower(state.trained(), done), 1, 1.0)
    return {
        **dataclasses.asdict(case),
        "tokens": case.tokens,
        "slots": sum(a * b * n for (a, b), n in rows.items()),
        "rows": [[*shape, n] for shape, n in rows.items()],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "matrix_parameters": matrix_parameters(case, state.params),
        "flops": total.flops,
        "flops_by_program": parts,
        "bytes": total.bytes,
        "collectives": total.collectives,
        "temporary_bytes": temporary,
        "argument_bytes": arguments,
        "attention": "dense" if attention is None else "blocks",
        "jax": jax.__version__,
    }


def matrix_parameters(case: Case, params: Any) -> int:
    """What every token is multiplied with: the layers' matrices, and where tokens are predicted the head."""
    layers = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim == 3)
    return layers + (params["lm_head"]["kernel"].size if case.work == "W2" else 0)


if __name__ == "__main__":
    print(json.dumps(measure(Case(**json.loads(sys.argv[1])))))
