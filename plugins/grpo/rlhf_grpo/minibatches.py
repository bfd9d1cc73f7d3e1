"""What is added to packed micro-batches once a rollout is scored."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from rlhf_core.rows import Packed
from rlhf_grpo.objective import kl_estimate


def with_advantages(batch: Packed, advantages: np.ndarray) -> Packed:
    """advantages: float32 [N], by a completion's number in the rollout, which `index` holds for every sequence."""
    index = batch.sequence_values["index"].astype(np.int64)
    laid = np.where(batch.last >= 0, advantages[index], 0.0).astype(np.float32)
    return batch._replace(sequence_values={**batch.sequence_values, "advantages": laid})


def with_kept(batches: Sequence[Packed], entropies: Sequence[np.ndarray], share: float) -> list[Packed]:
    """Marks, by `kept`, the share of a minibatch's tokens that have the highest entropies (linear quantile)."""
    there = [batch.trained >= 0 for batch in batches]
    every = np.concatenate([e[t] for e, t in zip(entropies, there, strict=True)])
    # All completions may have been truncated, and masked.
    threshold = np.quantile(every, 1 - share) if len(every) else np.inf
    return [
        batch._replace(token_values={**batch.token_values, "kept": ((e >= threshold) & t).astype(np.float32)})
        for batch, e, t in zip(batches, entropies, there, strict=True)
    ]


def with_entropy_scale(
    batches: Sequence[Packed], aggregation: str, max_completion_length: int
) -> list[Packed]:
    """Lays `entropy_scale`, the denominator of the policy loss over that of the mean entropy, in every sequence."""
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


def sequence_kl(batches: Sequence[Packed], n: int, name: str) -> np.ndarray:
    """The KL estimate of the sampling policy summed over each of the n completions, float64 [n], nats."""
    out = np.zeros(n)
    for batch in batches:
        logps = jnp.asarray(batch.token_values["sampling_logps"])
        kl = np.asarray(kl_estimate(logps, jnp.asarray(batch.token_values["ref_logps"]), name))
        row, at = np.nonzero(batch.trained >= 0)
        sequence = batch.rows.sequence[row, batch.trained[row, at]]
        np.add.at(out, batch.sequence_values["index"][row, sequence].astype(np.int64), kl[row, at])
    return out
