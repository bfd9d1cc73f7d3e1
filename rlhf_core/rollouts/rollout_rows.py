"""Choose the rows that a rollout's groups are packed into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data import count_updates
from rlhf_core.fit.batches import attention_skips_blocks
from rlhf_core.mesh import row_multiple
from rlhf_core.packing import Layout, Tree, choose_layout
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS, NO_CROSSOVER, row_cost
from rlhf_core.training.choose_attention import choose_attention

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.models import Model
    from rlhf_core.rollouts.collector import RolloutCollector, RolloutOptions
    from rlhf_core.training.context import Context

FILLS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Mean lengths of completions to plan for, as shares of the full length."""


def choose_rollout_rows(context: Context, model: Model, collector: RolloutCollector) -> tuple[Model, Layout]:
    """Choose rows with room for completions of full length; return the model, its attention chosen for them, too.

    `config.total_batch_size` counts completions. Without devices the layout is None.
    """
    config = context.config
    sizes, group, length = collector.tree_sizes()

    def choose() -> tuple[Model, Layout]:
        width = model.definition.hidden_size
        layout = group_layout(config, sizes, width, context.mesh, group=group, length=length)
        longest = longest_groups(config, sizes, group=group, length=length)
        return choose_attention(model, config, context.stage, longest, layout), layout

    chosen: tuple[Model, Layout] = context.on_mesh(choose, otherwise=(model, None))
    return chosen


def tree_sizes(
    prompt_sizes: NDArray[np.int64], options: RolloutOptions
) -> tuple[NDArray[np.int64], int, int]:
    """Return the most tokens of each tree's prompt, how many completions share one, and the most tokens of these.

    prompt_sizes: int64 [prompts], tokens.
    """
    turn, environment = options.sampling.max_completion_length, options.environment
    if environment is None:
        return prompt_sizes, options.num_generations, turn
    length = environment.length(turn)
    if environment.history == "kept":
        return prompt_sizes, options.num_generations, length
    return prompt_sizes + length - turn, 1, turn


def group_layout(
    config: TrainerConfig,
    prompt_sizes: NDArray[np.integer],
    hidden_size: int,
    mesh: Mesh,
    *,
    group: int,
    length: int,
) -> Layout:
    """Choose rows for groups over prompts of these sizes, in tokens.

    They have room for completions of the full length; which rows are cheapest depends on how long completions will be,
    and is judged over `FILLS`.
    """
    skips = attention_skips_blocks(config, mesh)
    crossover = NO_CROSSOVER if skips else 6 * hidden_size
    mean = float(prompt_sizes.mean())
    together = group
    cost = _group_cost(mean, length, group, group, crossover)
    for part in (g for g in range(1, group) if group % g == 0):
        # Sharing the prompt does not pay where attention over the whole group costs more than repeating it.
        split = _group_cost(mean, length, group, part, crossover)
        if split < 0.9 * cost:
            together, cost = part, split
    longest = prompt_sizes + together * length
    per_update = config.total_batch_size // together
    wanted = int(np.ceil(longest.mean() * per_update)) // config.gradient_accumulation_steps
    written = np.array([[int(np.ceil(fill * together * length))] for fill in FILLS])
    return choose_layout(
        prompt_sizes + written,
        together,
        hidden_size=hidden_size,
        max_tokens=min(MICRO_BATCH_TOKENS, max(wanted, 1)),
        trees_per_update=per_update,
        trained_counts=np.broadcast_to(written, (len(FILLS), len(prompt_sizes))),
        row_multiple=row_multiple(mesh),
        longest=int(longest.max()),
        skips_blocks=skips,
        updates=count_updates(
            len(prompt_sizes),
            config.total_batch_size // group,
            config.num_train_epochs,
            config.max_training_steps,
        ),
    )


def longest_groups(
    config: TrainerConfig, prompt_sizes: NDArray[np.integer], *, group: int, length: int
) -> list[Tree]:
    """Return the groups of one update at their largest: what rows will look like."""
    return full_groups(prompt_sizes[: config.total_batch_size // group], group=group, length=length)


def full_groups(prompt_sizes: NDArray[np.integer], *, group: int, length: int) -> list[Tree]:
    """Return a group of completions of the full length for each prompt."""
    completion = np.zeros(length, np.int32)
    return [Tree(np.zeros(size, np.int32), (completion,) * group) for size in prompt_sizes]


def _group_cost(prompt: float, length: int, group: int, together: int, crossover: int) -> float:
    """Estimate the relative cost of a group in rows that hold the prompt and `together` of its completions."""
    return group // together * row_cost(int(prompt + together * length), crossover)
