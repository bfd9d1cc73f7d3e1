"""Attention over rows in Pallas kernels for GPUs and TPUs, which visit only the blocks that a query sees.

FlashAttention (Dao et al. 2022, 2023) over the rows of `rlhf_core.models.attend`: no array of time × time exists,
forward or backward, and `visible_until` alone decides which blocks are computed, row by row. Softmax sums and
accumulators are float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rlhf_core import InputError
from rlhf_core.mesh import mesh_of_rows, row_axes
from rlhf_core.models import Blocks, attend, attend_blocks, platform, sinks_gradient

PLATFORMS = ("gpu", "tpu")
LARGEST_HEAD = 256


@dataclass(frozen=True)
class Kernels:
    """Which kernels run, in which blocks, forward and backward; None: those that suit the arrays. interpret: on the
    CPU, for tests.
    """

    platform: str
    blocks: tuple[Blocks, Blocks] | None = None
    interpret: bool = False


def attend_pallas(
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
    kernels: Kernels | None = None,
) -> jax.Array:
    """Compute `attend` in kernels that keep logits out of memory, on GPUs (Triton) and TPUs (Mosaic). Heads of more
    than 256 dimensions, which no kernel holds, are computed by `attend_blocks`. Queries that see no key get 0, and
    give no gradient.

    On a mesh each device computes its rows, and with `tensor` its heads; rows that the mesh does not divide are
    computed by `attend`.

    Raises InputError on CPUs.
    """
    if kernels is None:
        kernels = Kernels(platform())
    time, size = k.shape[2:]
    if kernels.platform not in PLATFORMS:
        raise InputError(
            f"attention 'pallas': its kernels run on GPUs and TPUs, not on a {kernels.platform.upper()}; set attention "
            'to "blocks" or "auto"'
        )
    if size > LARGEST_HEAD:
        more: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "starts": starts}
        return attend_blocks(q, k, v, positions, visible_until, **more)
    mesh = mesh_of_rows(q)
    if mesh is None and not _is_local(q):
        return attend(q, k, v, positions, visible_until, window=window, softcap=softcap, sinks=sinks)
    blocks = kernels.blocks or _kernels_of(kernels.platform).choose_blocks(time, size, q.shape[2], v.dtype)
    of_queries = None
    if starts is not None:
        run = q.shape[3] // len(starts)
        first, second = (Blocks(math.gcd(each.queries, run), math.gcd(each.keys, run)) for each in blocks)
        blocks = first, second
        at = (starts[:, None] + jnp.arange(run, dtype=jnp.int32)).reshape(-1)
        own_positions = None if window is None else positions[:, at]
        of_queries = at, own_positions
    fill = max(each.fill(time) for each in blocks)
    if fill:
        q, k, v = (_filled(x, x.ndim - 2, fill) for x in (q, k, v))
        positions, visible_until = (_filled(x, 1, fill) for x in (positions, visible_until))
    near = None if window is None else jnp.asarray(window, jnp.int32).reshape(1)
    of_keys = None if window is None else positions
    rows = (visible_until, of_keys, near, of_queries)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    mixed = _attend(q, k, v, rows, sinks, softcap, kernels, blocks)
    mixed = mixed.reshape(*mixed.shape[:2], -1)
    return mixed[:, :time] if fill else mixed


def _filled(x: jax.Array, axis: int, fill: int) -> jax.Array:
    """Append `fill` zeros along an axis."""
    return jnp.pad(x, [(0, fill if i == axis else 0) for i in range(x.ndim)])


def _kernels_of(platform: str) -> ModuleType:
    """Import the kernels of a platform; not with this module, since Pallas takes longer to import than most commands
    need.
    """
    return import_module(f"rlhf_kernels.attention_{platform}")


def _is_local(x: jax.Array) -> bool:
    """Return whether an array is all on one device, or one device's part within `jax.shard_map`."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.size == 1 or set(mesh.axis_names) == set(mesh.manual_axes)


def _per_device(
    function: Callable[..., Any], q: jax.Array, rows: Any, ins: tuple[int, ...], outs: tuple[int, ...]
) -> Callable[..., Any]:
    """Return function(*arrays, rows) run by each device of the mesh on its rows and heads.

    ins, outs: the axis of kv heads of each array; 0: an array without rows.
    """
    mesh = mesh_of_rows(q)
    if mesh is None:
        return function
    tensor = "tensor" if q.shape[1] % mesh.shape["tensor"] == 0 else None

    def spec(heads: int) -> PartitionSpec:
        return PartitionSpec(*(row_axes(), *(None,) * (heads - 1))[:heads], tensor)

    by_row = PartitionSpec(row_axes())
    window = rows[2] is not None
    row_specs = (by_row, by_row if window else None, PartitionSpec() if window else None, None)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*map(spec, ins), row_specs),
        out_specs=tuple(map(spec, outs)),
        check_vma=False,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Any,
    sinks: jax.Array | None,
    softcap: float | None,
    kernels: Kernels,
    blocks: tuple[Blocks, Blocks],
) -> jax.Array:
    return _forward(q, k, v, rows, sinks, softcap, kernels, blocks)[0]


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: Any,
    sinks: jax.Array | None,
    softcap: float | None,
    kernels: Kernels,
    blocks: tuple[Blocks, Blocks],
) -> tuple[jax.Array, Any]:
    how = {"softcap": softcap, "blocks": blocks[0], "interpret": kernels.interpret}

    def local(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, rows: Any) -> Any:
        return tuple(_kernels_of(kernels.platform).forward(q, k, v, rows, sinks, **how))

    mixed, normalizers = _per_device(local, q, rows, (1, 1, 1, 0), (2, 1))(q, k, v, sinks, rows)
    return mixed, (q, k, v, rows, sinks, mixed, normalizers)


def _backward(
    softcap: float | None, kernels: Kernels, blocks: tuple[Blocks, Blocks], residuals: Any, d_mixed: jax.Array
) -> Any:
    how = {"softcap": softcap, "blocks": blocks[1], "interpret": kernels.interpret}
    q, k, v, rows, sinks, mixed, normalizers = residuals

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mixed: jax.Array,
        d_mixed: jax.Array,
        normalizers: jax.Array,
        rows: Any,
    ) -> Any:
        # Σ_s p dp of a query is Σ_h d_mixed · mixed.
        sums = (d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(-1).transpose(0, 2, 3, 1)
        found = _kernels_of(kernels.platform).backward(q, k, v, rows, d_mixed, normalizers, sums, **how)
        return *found, sums

    call = _per_device(local, q, rows, (1, 1, 1, 2, 2, 1), (1, 1, 1, 1))
    *found, sums = call(q, k, v, mixed, d_mixed, normalizers, rows)
    return *found, None, sinks_gradient(sinks, normalizers, sums)


_attend.defvjp(_forward, _backward)
