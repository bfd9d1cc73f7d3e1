"""Values that GRPO adds to packed micro-batches, and the KL penalty of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core import Rollouts
from rlhf_core.packing import Packed
from rlhf_grpo.objective import kl_estimate


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


def sequence_kl(samples: Rollouts, ref_logps: NDArray[np.float32], name: str) -> NDArray[np.float64]:
    """Sum the sampling policy's KL estimate over the tokens that it wrote, float64 [N], nats.

    ref_logps: float32 [N, C], as `samples.logps`.
    """
    there = samples.mask
    logps = np.where(there, samples.logps, 0.0).astype(np.float32)
    kl = np.asarray(kl_estimate(jnp.asarray(logps), jnp.asarray(ref_logps), name), np.float64)
    total: NDArray[np.float64] = np.where(there, kl, 0.0).sum(1)
    return total
