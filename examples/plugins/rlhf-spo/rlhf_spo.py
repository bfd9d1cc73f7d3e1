"""Two components in one package: the policy loss `spo` and the reward `finished_sentences`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from rlhf_core import LossOutput, PolicyInputs

SENTENCE = re.compile(r"[^.!?]+[.!?]*")


@dataclass(frozen=True)
class SPOLoss:
    """−r A + |A| (r − 1)² / (2 ε): where clipping stops learning, a parabola with its top at the bound turns it round
    (Simple Policy Optimization, Xie et al. 2024).

    epsilon: ε > 0, unitless: the ratio r that a positive advantage draws a token to is 1 + ε.
    """

    epsilon: float = 0.2
    aggregation: ClassVar[str] = "token_mean"

    def __post_init__(self) -> None:
        if self.epsilon <= 0:
            raise ValueError(f"epsilon must be above 0, got {self.epsilon}")

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        """Float32 [N, T], one value a token."""
        ratio = jnp.exp(inputs.logps - inputs.old_logps)
        penalty = jnp.abs(inputs.advantages) * jnp.square(ratio - 1.0) / (2.0 * self.epsilon)
        return LossOutput(
            penalty - ratio * inputs.advantages, {"beyond": jnp.abs(ratio - 1.0) > self.epsilon}
        )


def finished_sentences(completions: Sequence[str], *, at_most: int = 3) -> list[float | None]:
    """The share of a text's sentences that end in . ! or ?, 0 where there are more than `at_most`; None without any."""
    return [_share(SENTENCE.findall(text.strip()), at_most) for text in completions]


def _share(sentences: Sequence[str], at_most: int) -> float | None:
    if not sentences:
        return None
    ended = sum(sentence[-1] in ".!?" for sentence in sentences)
    return ended / len(sentences) if len(sentences) <= at_most else 0.0
