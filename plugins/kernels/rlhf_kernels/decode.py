"""Attention of one query per row over entries first … end - 1 of a cache, in kernels that read no others.

A dense product reads a whole cache for every token, however little of it is written yet. The kernels loop over blocks
of entries and keep running maxima and sums, as in online softmax (Milakov and Gimelshein 2018). They return parts of a
softmax, to be joined with others over the same queries. N below is rows times kv heads, R query heads per kv head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.models import MASKED, AttentionPart, platform

GPU_ENTRIES = 128
"""The most entries per block."""
GPU_BLOCK_BYTES = 2**14
"""Bytes of keys, and of values, of a block at most. Three of each are held together, in 96 KB of shared memory."""
GPU_PROGRAMS = 512
"""Fewer (row, kv head) pairs than this are split over entries: three or four per multiprocessor hide latency."""
GPU_QUERIES = 16
"""The fewest rows of a product that tensor cores compute; missing ones are zero."""
TPU_ENTRIES = 128
TPU_BLOCK_BYTES = 2**20
"""Bytes of keys, and of values, that a step on a TPU reads: enough to outweigh the fixed cost of a step, a third of a
microsecond, and little enough for two of each in vector memory."""


def attend_visible(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    end: jax.Array,
    softcap: float | None = None,
    *,
    on: str | None = None,
    interpret: bool = False,
) -> AttentionPart | None:
    """Compute attention of q, [B, K, R, h], scaled, over entries first … end - 1 of keys [B, K, h, T] and values
    [B, K, T, h], all on one device; softcap as in `attend`. None: no kernel suits such a cache.

    on: "gpu" or "tpu", the kernel, whatever the cache; None: the platform's. interpret: run it as JAX operations.
    Where no entry is visible, output and sum are 0 and the maximum is MASKED.
    """
    if on is None:
        on = platform()
        if not _suits(keys, on):
            return None
    batch, kv_heads, repeats, size = q.shape
    entries = keys.shape[3]
    bounds = jnp.stack([first, end]).astype(jnp.int32)
    kernel = _on_gpu if on == "gpu" else _on_tpu
    mixed, highest, total = kernel(
        bounds,
        q.reshape(-1, repeats, size),
        keys.reshape(-1, size, entries),
        values.reshape(-1, entries, size),
        softcap,
        interpret,
    )
    return AttentionPart(*(x.reshape(batch, kv_heads, *x.shape[1:]) for x in (mixed, highest, total)))


def _suits(keys: jax.Array, on: str) -> bool:
    """Return whether a platform has a kernel for caches like `keys`, [B, K, h, T]."""
    size, entries = keys.shape[2:]
    if keys.dtype.itemsize not in (2, 4):
        return False
    if on == "gpu":
        return 16 <= size <= 256 and entries > GPU_ENTRIES and _has_triton()
    # Values of smaller heads would be padded to 128 numbers in a TPU's memory.
    return on == "tpu" and size % 128 == 0 and entries > TPU_ENTRIES


def _has_triton() -> bool:
    """Return whether XLA compiles Triton for the GPUs: NVIDIA's since Ampere, as all are that programs are compiled for
    in a process without one.
    """
    device = jax.local_devices()[0]
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform == "cpu" or (major.isdigit() and int(major) >= 8)


def _cost(q: jax.Array, keys: jax.Array, block: int) -> dict[str, int]:
    """Estimate what a call computes and moves while a cache fills, on average over its tokens, without a window.

    A program's text carries it for `rlhf check --on`, which sees no more of a kernel than its operands.
    """
    (count, repeats, size), entries = q.shape, keys.shape[2]
    moved = 2 * (entries + block) // 2 * size * keys.dtype.itemsize
    outputs = repeats * (size * (q.dtype.itemsize + 4) + 8)
    return {"flops": 2 * count * repeats * size * entries, "bytes_accessed": count * (moved + outputs)}


def _add_block(carry: Any, q: Any, keys: Any, values: Any, seen: Any, softcap: float | None) -> Any:
    """Add a block to (output [..., R, h], maximum, sum [..., R, 1]). keys: [..., h, s]; values: [..., s, h]."""
    mixed, highest, total = carry
    logits = jnp.matmul(q, keys, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(seen, logits, MASKED)
    new = jnp.maximum(highest, logits.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(logits - new), 0.0)
    scale = jnp.exp(highest - new)
    mixed = mixed * scale + jnp.matmul(
        weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return mixed, new, total * scale + weights.sum(-1, keepdims=True)


def _on_gpu(
    bounds: jax.Array,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    softcap: float | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run a program per n of N, or several that take turns in blocks where N is small."""
    from jax.experimental import pallas as pl  # here: slow to import, and unused on CPUs
    from jax.experimental.pallas import triton as plgpu

    count, repeats, size = q.shape
    entries = keys.shape[2]
    rows = max(GPU_QUERIES, pl.next_power_of_2(repeats))
    width = pl.next_power_of_2(size)
    block = min(GPU_BLOCK_BYTES // (width * keys.dtype.itemsize), GPU_ENTRIES)
    splits = min(-(-GPU_PROGRAMS // count), -(-entries // block))

    def kernel(bounds: Any, q: Any, keys: Any, values: Any, mixed: Any, highest: Any, total: Any) -> None:
        row = jnp.arange(rows)[:, None] < repeats
        at = jnp.arange(width) < size
        query = plgpu.load(q.at[pl.ds(0, rows), pl.ds(0, width)], mask=row & at, other=0)
        first, end = bounds[0], bounds[1]

        def add(i: Any, carry: Any) -> Any:
            start = begin + i * splits * block
            place = start + jnp.arange(block)
            seen = (place >= first) & (place < end)
            inside = pl.ds(start, block)
            key = plgpu.load(keys.at[pl.ds(0, width), inside], mask=at[:, None] & seen, other=0)
            value = plgpu.load(values.at[inside, pl.ds(0, width)], mask=seen[:, None] & at, other=0)
            return _add_block(carry, query, key, value, seen[None], softcap)

        begin = (lax.div(first, block) + pl.program_id(1)) * block
        rounds = jnp.maximum(pl.cdiv(end - begin, splits * block), 0)
        empty = jnp.zeros((rows, width)), jnp.full((rows, 1), MASKED), jnp.zeros((rows, 1))
        found = lax.fori_loop(0, rounds, add, empty)
        plgpu.store(mixed.at[pl.ds(0, rows), pl.ds(0, width)], found[0], mask=row & at)
        for out, x in zip((highest, total), found[1:], strict=True):
            plgpu.store(out.at[pl.ds(0, rows)], x[:, 0], mask=row[:, 0])

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda n, _: (n, *(0 for _ in shape)))

    def split(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda n, part: (n, part, *(0 for _ in shape)))

    shapes = (repeats, size), (repeats,), (repeats,)
    mixed, highest, total = pl.pallas_call(
        kernel,
        grid=(count, splits),
        in_specs=[
            pl.BlockSpec((2,), lambda *_: (0,)),
            whole(repeats, size),
            whole(size, entries),
            whole(entries, size),
        ],
        out_specs=[split(*shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct((count, splits, *shape), jnp.float32) for shape in shapes],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="attend_visible",
        metadata={key: str(number) for key, number in _cost(q, keys, block).items()},
    )(bounds, q, keys, values)
    if splits == 1:
        return mixed[:, 0], highest[:, 0], total[:, 0]
    most = highest.max(1)
    scale = jnp.exp(highest - most[:, None])
    return (mixed * scale[..., None]).sum(1), most, (total * scale).sum(1)


def _on_tpu(
    bounds: jax.Array,
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    softcap: float | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run over blocks of rows of N and of entries.

    A block without visible entries has the index of the one next to it that has some, which is not fetched again.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count, repeats, size = q.shape
    entries = keys.shape[2]
    block = min(TPU_ENTRIES, entries)
    rows = min(count, max(TPU_BLOCK_BYTES // (size * block * keys.dtype.itemsize), 1))

    def kernel(bounds: Any, q: Any, keys: Any, values: Any, mixed: Any, highest: Any, total: Any) -> None:
        at = pl.program_id(1)

        @pl.when(at == 0)
        def _() -> None:
            mixed[...] = jnp.zeros_like(mixed)
            highest[...] = jnp.full_like(highest, MASKED)
            total[...] = jnp.zeros_like(total)

        first, end = bounds[0], bounds[1]

        @pl.when((at * block < end) & ((at + 1) * block > first))
        def _() -> None:
            place = at * block + lax.broadcasted_iota(jnp.int32, (1, 1, block), 2)
            value = values[...]
            if entries % block:  # what lies beyond the array may be NaN
                inside = at * block + lax.broadcasted_iota(jnp.int32, (1, block, 1), 1) < entries
                value = jnp.where(inside, value, 0)
            seen = (place >= first) & (place < end)
            carry = mixed[...], highest[...], total[...]
            mixed[...], highest[...], total[...] = _add_block(carry, q[...], keys[...], value, seen, softcap)

    def visible(at: Any, bounds: Any) -> Any:
        """Return the visible block next to a block."""
        last = lax.div(jnp.maximum(bounds[1] - 1, 0), block)
        return jnp.clip(at, jnp.minimum(lax.div(bounds[0], block), last), last)

    shapes = (repeats, size), (repeats, 1), (repeats, 1)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, *shape), lambda n, *_: (n, 0, 0))

    mixed, highest, total = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(count, rows), pl.cdiv(entries, block)),
            in_specs=[
                whole(repeats, size),
                pl.BlockSpec((rows, size, block), lambda n, at, bounds: (n, 0, visible(at, bounds))),
                pl.BlockSpec((rows, block, size), lambda n, at, bounds: (n, visible(at, bounds), 0)),
            ],
            out_specs=[whole(*shape) for shape in shapes],
        ),
        out_shape=[jax.ShapeDtypeStruct((count, *shape), jnp.float32) for shape in shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="attend_visible",
        cost_estimate=pl.CostEstimate(transcendentals=0, **_cost(q, keys, block)),
    )(bounds, q, keys, values)
    return mixed, highest[..., 0], total[..., 0]
