"""The trainer's values beside a journal, values/NNNNNN.npz, computed in float64 from the policies that sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.rollouts import Rollout
from rlhf_core.runs import open_run

LAMBDAS = (1 / 2, -1 / 2, 1 / 8, -1 / 8, 1 / 32, -1 / 32)
TOLERANCE = 0.02


def moments(logits: np.ndarray, token: int) -> list[float]:
    """log p of a token, entropy, variance of log p, and log e_λ for every λ; float64."""
    shifted = logits.astype(np.float64) - logits.max()
    log_p = shifted - np.log(np.exp(shifted).sum())
    p = np.exp(log_p)
    entropy = -(p * log_p).sum()
    variance = (p * log_p**2).sum() - entropy**2
    return [
        log_p[token],
        entropy,
        variance,
        *(bet(log_p[token], entropy, variance, each) for each in LAMBDAS),
    ]


def bet(log_p: float, entropy: float, variance: float, exponent: float) -> float:
    """log e_λ of a token, of a distribution with an entropy: λ > 0 by Bennett's inequality, λ < 0 linear."""
    excess = -log_p - entropy
    if exponent < 0:
        factor = min(-exponent, 1 / (2 * entropy))
        return math.log(1 + factor * excess) - factor * TOLERANCE
    # Of all with this variance and a lower bound of −H, the largest mean is that of two values, −H and V / H.
    share = variance / (variance + entropy**2)
    largest = share * math.exp(exponent * entropy)
    largest += (1 - share) * math.exp(-exponent * variance / entropy)
    return -exponent * excess - math.log(largest) - exponent * TOLERANCE


def read(rollout: Rollout, model: Any, temperature: float = 1.0) -> np.ndarray:
    """`moments` of every token of a rollout, [tokens, 9]."""
    samples, rows = rollout.samples, []
    for i, length in enumerate(np.asarray(samples.lengths).tolist()):
        prompt = np.asarray(rollout.prompt_ids[i // rollout.group])
        ids = np.concatenate([prompt, samples.tokens[i, :length]])
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(ids)] = ids
        there = (np.arange(32) < len(ids)).astype(np.int32)[None]
        logits = np.asarray(model.logits(padded, there))[0] / temperature
        rows += [moments(logits[len(prompt) + t - 1], int(ids[len(prompt) + t])) for t in range(length)]
    return np.array(rows)


def sums(table: np.ndarray) -> list[float]:
    """What `sums` has of these tokens, after engine and version."""
    excess = -table[:, 0] - table[:, 1]
    return [float(len(table)), excess.sum(), table[:, 2].sum(), *table[:, 3:].sum(0)]


def write_values(stage: Path, models: Sequence[Any]) -> None:
    """Write the values of every rollout of a stage; models: the policy of each, or one for all."""
    (found,) = open_run(stage).stages
    folder = stage / "values"
    folder.mkdir(exist_ok=True)
    for entry in found.rollouts():
        rollout = entry.rollout
        table = read(rollout, models[rollout.number if len(models) > 1 else 0])
        version = float(np.asarray(rollout.samples.version).max())
        names = ("trainer_logps", "entropies", "variances")
        np.savez(
            folder / f"{rollout.number:06d}.npz",
            **dict(zip(names, table[:, :3].T.astype(np.float32), strict=True)),
            sums=np.array([[0.0, version, *sums(table)]]),
            rollout=np.array(rollout.digest()),
        )
