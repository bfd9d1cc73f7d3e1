"""The shapes of rows that groups of completions are trained in, before any completion is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit.batches import skips_unseen
from rlhf_core.mesh import row_multiple
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS, NO_CROSSOVER, row_cost
from rlhf_core.packing.rows import Layout, Tree, choose_layout

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_grpo.config import GRPOConfig


def group_layout(
    config: GRPOConfig, prompt_sizes: NDArray[np.integer], hidden_size: int, mesh: Mesh
) -> Layout:
    """Rows for groups over prompts of these sizes, tokens, with room for completions of the full length."""
    group, length = config.num_generations, config.sampling.max_completion_length
    skips = skips_unseen(config, mesh)
    crossover = NO_CROSSOVER if skips else 6 * hidden_size
    mean, together = float(prompt_sizes.mean()), group
    cost = _group_cost(mean, length, group, group, crossover)
    for part in (g for g in range(1, group) if group % g == 0):
        # Sharing the prompt does not pay where attention over the whole group costs more than repeating it.
        if (split := _group_cost(mean, length, group, part, crossover)) < 0.9 * cost:
            together, cost = part, split
    sizes = prompt_sizes + together * length
    per_update = config.total_batch_size // together
    wanted = int(np.ceil(sizes.mean() * per_update)) // config.gradient_accumulation_steps
    return choose_layout(
        sizes,
        together,
        hidden_size=hidden_size,
        max_tokens=min(MICRO_BATCH_TOKENS, max(wanted, 1)),
        trees_per_update=per_update,
        trained_counts=np.full(len(sizes), together * length),
        row_multiple=row_multiple(mesh),
        longest=int(sizes.max()),
        skips_unseen=skips,
    )


def longest_groups(config: GRPOConfig, prompt_sizes: NDArray[np.integer]) -> list[Tree]:
    """The groups of one update, as large as they get: what rows will look like."""
    group, length = config.num_generations, config.sampling.max_completion_length
    completion = np.zeros(length, np.int32)
    prompts = prompt_sizes[: max(1, config.total_batch_size // group)]
    return [Tree(np.zeros(size, np.int32), (completion,) * group) for size in prompts]


def _group_cost(prompt: float, length: int, group: int, together: int, crossover: int) -> float:
    """Relative cost of a group in rows that hold the prompt and `together` of its completions."""
    return group // together * row_cost(int(prompt + together * length), crossover)
