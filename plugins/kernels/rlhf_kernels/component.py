"""The kernels as a component of the kind `attention`."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from rlhf_core.models import AttentionPart
from rlhf_kernels.attention import attend_pallas
from rlhf_kernels.decode import attend_visible


@dataclass(frozen=True)
class PallasAttention:
    """Compute attention in kernels that keep logits out of memory, on GPUs (Triton) and TPUs (Mosaic). Heads of more
    than 256 dimensions, which no kernel holds, are computed like `blocks`. Queries that see no key get 0, and give no
    gradient.

    On a mesh each device computes its rows, and with `tensor` its heads; rows that the mesh does not divide are
    computed like `xla`. Samplers read only the entries of a cache that are written.

    Raises InputError on CPUs.
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
        sinks: jax.Array | None = None,
        starts: jax.Array | None = None,
    ) -> jax.Array:
        return attend_pallas(
            q,
            k,
            v,
            positions,
            visible_until,
            window=window,
            softcap=softcap,
            sinks=sinks,
            starts=starts,
        )

    def over_cache(
        self,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        first: jax.Array,
        end: jax.Array,
        softcap: float | None = None,
    ) -> AttentionPart | None:
        return attend_visible(q, keys, values, first, end, softcap)
