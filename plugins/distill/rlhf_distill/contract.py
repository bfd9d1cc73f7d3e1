"""The contract of divergences: what they take and return, and the kind under which they are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rlhf_core import Kind

if TYPE_CHECKING:
    import jax


class Divergence(Protocol):
    """Compute a term per vocabulary id; the trainer sums them.

    student_logps, teacher_logps: float32 of one shape, nats; differentiable in the student's. A term
    depends on the two log-probabilities of its own id alone: with `top_k` the last id stands for all others. Returns
    float32 in the same shape.
    """

    def __call__(self, student_logps: jax.Array, teacher_logps: jax.Array) -> jax.Array: ...


DIVERGENCE: Kind[Divergence] = Kind("divergence", ("student_logps", "teacher_logps"), constant=True)
