"""A problem for `token_logps`, and what it gives and passes back in float64 NumPy, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlhf_core.surprisal import MOMENTS

LENGTH, DIM = 7, 16


def problem(
    dtype: Any = np.float32, rows: int = 4, vocab: int = 31
) -> tuple[Any, Any, np.ndarray, np.ndarray, np.ndarray]:
    """hidden, kernel, targets (one of five unused), and a cotangent for each result."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(rows, LENGTH, DIM)), dtype)
    kernel = jnp.asarray(rng.normal(size=(DIM, vocab)), dtype)
    targets = rng.integers(0, vocab, (rows, LENGTH)).astype(np.int32)
    targets[rng.random((rows, LENGTH)) < 0.2] = -1
    assert (targets == -1).any()
    return hidden, kernel, targets, rng.normal(size=(rows, LENGTH)), rng.normal(size=(rows, LENGTH))


def reference(
    hidden: Any,
    kernel: Any,
    targets: np.ndarray,
    g: np.ndarray,
    h: np.ndarray,
    temperature: float,
    softcap: float | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """log p, H and the gradients of Σ g log p + h H wrt hidden and kernel, float64, token by token."""
    hidden, kernel = np.asarray(hidden, np.float64), np.asarray(kernel, np.float64)
    logps, entropies = np.zeros(targets.shape), np.zeros(targets.shape)
    d_hidden, d_kernel = np.zeros(hidden.shape), np.zeros(kernel.shape)
    for row, k in zip(*np.nonzero(targets >= 0), strict=True):
        raw = hidden[row, k] @ kernel
        capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
        slope = np.ones_like(raw) if softcap is None else 1 / np.cosh(raw / softcap) ** 2
        logits = capped / temperature
        p = np.exp(logits) / np.exp(logits).sum()
        entropy = -(p * np.log(p)).sum()
        logps[row, k], entropies[row, k] = np.log(p[targets[row, k]]), entropy
        # The Jacobian of softmax, J = diag(p) - p pᵀ, applied to the derivatives with respect to p.
        d_p = h[row, k] * (-np.log(p) - 1)
        d_p[targets[row, k]] += g[row, k] / p[targets[row, k]]
        d_raw = (np.diag(p) - np.outer(p, p)) @ d_p * slope / temperature
        d_hidden[row, k] = kernel @ d_raw
        d_kernel += np.outer(hidden[row, k], d_raw)
    return logps, entropies, d_hidden, d_kernel


def moments(
    hidden: Any,
    kernel: Any,
    targets: np.ndarray,
    temperature: float,
    softcap: float | None,
    absent: Sequence[int] = (),
) -> dict[str, np.ndarray]:
    """What `Moments.named` returns, float64, token by token. absent: ids that have probability 0."""
    hidden, kernel = np.asarray(hidden, np.float64), np.asarray(kernel, np.float64)
    found = {name: np.zeros(targets.shape) for name in MOMENTS}
    present = np.setdiff1d(np.arange(kernel.shape[1]), absent)
    for row, k in zip(*np.nonzero(targets >= 0), strict=True):
        raw = hidden[row, k] @ kernel
        logits = (raw if softcap is None else softcap * np.tanh(raw / softcap)) / temperature
        log_p = logits - np.logaddexp.reduce(logits[present])
        p = np.exp(log_p[present])
        entropy = -(p * log_p[present]).sum()
        found["surprisal/logps"][row, k] = log_p[targets[row, k]]
        found["surprisal/entropies"][row, k] = entropy
        found["surprisal/variances"][row, k] = (p * log_p[present] ** 2).sum() - entropy**2
    return found
