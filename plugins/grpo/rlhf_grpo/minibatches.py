"""Micro-batches of a rollout: their layout, and the values that are laid into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit.batches import attention_skips_blocks
from rlhf_core.mesh import row_multiple
from rlhf_core.packing import Layout, Packed, Tree, choose_layout
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS, NO_CROSSOVER, row_cost
from rlhf_core.sampling import Rollouts
from rlhf_grpo.objective import kl_estimate

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_grpo.config import GRPOConfig


def with_kept(batches: Sequence[Packed], share: float) -> list[Packed]:
    """Replace `entropies` by `kept`: the share of a minibatch's tokens with the highest entropies (linear quantile)."""
    entropies = [batch.token_values["entropies"] for batch in batches]
    there = [batch.trained >= 0 for batch in batches]
    trained = np.concatenate([e[t] for e, t in zip(entropies, there, strict=True)])
    # All completions may have been truncated, and masked.
    threshold = np.quantile(trained, 1 - share) if len(trained) else np.inf
    marked = []
    for batch, e, t in zip(batches, entropies, there, strict=True):
        values = {name: x for name, x in batch.token_values.items() if name != "entropies"}
        values["kept"] = ((e >= threshold) & t).astype(np.float32)
        marked.append(batch._replace(token_values=values))
    return marked


def with_entropy_scale(
    batches: Sequence[Packed], aggregation: str, max_completion_length: int
) -> list[Packed]:
    """Give every sequence `entropy_scale`: the policy loss's denominator over the mean entropy's."""
    tokens = sum(int((b.trained >= 0).sum()) for b in batches)
    sequences = sum(int((b.last >= 0).sum()) for b in batches)
    effective = sum(
        int(b.token_values["kept"].sum() if "kept" in b.token_values else (b.trained >= 0).sum())
        for b in batches
    )
    denominator = {
        "token_mean": tokens,
        "sequence_mean": sequences,
        "fixed_length": sequences * max_completion_length,
    }[aggregation]
    scale = denominator / max(effective, 1)
    return [
        b._replace(
            sequence_values={**b.sequence_values, "entropy_scale": np.full(b.last.shape, scale, np.float32)}
        )
        for b in batches
    ]


class Places(NamedTuple):
    """Positions of a packed micro-batch's trained tokens, in `trained` and in arrays [completions, tokens]."""

    row: NDArray[np.intp]
    column: NDArray[np.intp]
    completion: NDArray[np.int64]
    token: NDArray[np.int64]


def locate(batch: Packed, prompt_sizes: NDArray[np.integer]) -> Places:
    """Locate every trained token by its completion's number in the rollout and its own within the completion.

    prompt_sizes: int [completions], tokens of each completion's prompt.
    """
    row, column = np.nonzero(batch.trained >= 0)
    slot = batch.trained[row, column]
    sequence = batch.rows.sequence[row, slot]
    completion = batch.sequence_values["index"][row, sequence].astype(np.int64)
    token = batch.rows.positions[row, slot].astype(np.int64) - prompt_sizes[completion]
    return Places(row, column, completion, token)


def sequence_kl(samples: Rollouts, ref_logps: NDArray[np.float32], name: str) -> NDArray[np.float64]:
    """Sum the sampling policy's KL estimate over the tokens that it wrote, float64 [N], nats.

    ref_logps: float32 [N, C], as `samples.logps`.
    """
    there = samples.mask
    logps = np.where(there, samples.logps, 0.0).astype(np.float32)
    kl = np.asarray(kl_estimate(jnp.asarray(logps), jnp.asarray(ref_logps), name), np.float64)
    total: NDArray[np.float64] = np.where(there, kl, 0.0).sum(1)
    return total


def on_host(x: jax.Array) -> np.ndarray:
    """Fetch an array, from all processes where there are several."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(jax.device_get(x))


def group_layout(
    config: GRPOConfig, prompt_sizes: NDArray[np.integer], hidden_size: int, mesh: Mesh
) -> Layout:
    """Choose rows for groups over prompts of these sizes, in tokens, with room for completions of the full length."""
    group, length = config.num_generations, config.sampling.max_completion_length
    skips = attention_skips_blocks(config, mesh)
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
        skips_blocks=skips,
    )


def longest_groups(config: GRPOConfig, prompt_sizes: NDArray[np.integer]) -> list[Tree]:
    """Return the groups of one update at their largest: what rows will look like."""
    group, length = config.num_generations, config.sampling.max_completion_length
    completion = np.zeros(length, np.int32)
    prompts = prompt_sizes[: max(1, config.total_batch_size // group)]
    return [Tree(np.zeros(size, np.int32), (completion,) * group) for size in prompts]


def _group_cost(prompt: float, length: int, group: int, together: int, crossover: int) -> float:
    """Estimate the relative cost of a group in rows that hold the prompt and `together` of its completions."""
    return group // together * row_cost(int(prompt + together * length), crossover)
