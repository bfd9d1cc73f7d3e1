"""What an attention is: a kind of component of its own, which models call and trainers choose by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rlhf_core.contracts import Kind

if TYPE_CHECKING:
    import jax


class AttentionOver(Protocol):
    """Attention of rows with themselves, as `rlhf_core.models.attention.attend` defines it, shapes and all.

    window: int32 scalar, traced where layers differ in it. softcap: a Python number. What an implementation cannot do,
    it raises InputError for, when it is traced.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        positions: jax.Array,
        visible_until: jax.Array,
        *,
        window: jax.Array | None = None,
        softcap: float | None = None,
    ) -> jax.Array: ...


ATTENTION: Kind[AttentionOver] = Kind(
    "attention", ("q", "k", "v", "positions", "visible_until", "window", "softcap"), constant=True
)
