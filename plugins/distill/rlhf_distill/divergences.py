"""Divergences between the next-token distributions of student and teacher: a term per vocabulary id.

With s and t the probabilities of an id under the student and the teacher. An id to which a distribution gives no
probability, log-probability −inf, counts as the limit says: 0 log 0 = 0; a divergence is +inf where its limit is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from pydantic import Field


def forward_kl(student_logps: jax.Array, teacher_logps: jax.Array) -> jax.Array:
    """Compute the terms of KL(teacher ‖ student): t (log t − log s)."""
    return _relative(teacher_logps, student_logps)


def reverse_kl(student_logps: jax.Array, teacher_logps: jax.Array) -> jax.Array:
    """Compute the terms of KL(student ‖ teacher): s (log s − log t)."""
    return _relative(student_logps, teacher_logps)


@dataclass(frozen=True)
class JensenShannon:
    """Compute the terms of the generalized Jensen-Shannon divergence (Agarwal et al. 2024).

    beta KL(teacher ‖ m) + (1 − beta) KL(student ‖ m) with m = beta teacher + (1 − beta) student, for 0 < beta < 1. At
    the ends, where that vanishes, it is what its ratios to beta and to 1 − beta tend to: 0 is KL(teacher ‖ student) and
    1 is KL(student ‖ teacher).
    """

    beta: Annotated[float, Field(ge=0, le=1)] = 0.5

    def __call__(self, student_logps: jax.Array, teacher_logps: jax.Array) -> jax.Array:
        if self.beta == 0:
            return forward_kl(student_logps, teacher_logps)
        if self.beta == 1:
            return reverse_kl(student_logps, teacher_logps)
        # Where both are −inf, so is their mixture, whose gradient would be NaN.
        neither = jnp.isneginf(student_logps) & jnp.isneginf(teacher_logps)
        mixture = jnp.logaddexp(
            math.log(self.beta) + jnp.where(neither, 0.0, teacher_logps),
            math.log1p(-self.beta) + jnp.where(neither, 0.0, student_logps),
        )
        of_teacher, of_student = (_relative(logps, mixture) for logps in (teacher_logps, student_logps))
        return self.beta * of_teacher + (1.0 - self.beta) * of_student


def _relative(logps: jax.Array, others: jax.Array) -> jax.Array:
    """Compute p (log p − log q), 0 where p = 0, with a gradient that is finite there."""
    absent = jnp.isneginf(logps)
    present = jnp.where(absent, 0.0, logps)
    return jnp.where(absent, 0.0, jnp.exp(present) * (present - jnp.where(absent, 0.0, others)))
