"""Formulas of layers with a state, over rows of packed trees: the gated delta rule in chunks, short convolutions.

A state is empty at the start of a tree, and every branch continues from the state at the end of its tree's prefix.
Positions of a tree count from 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from rlhf_core.models import previous_tokens

CHUNK = 64
"""Tokens whose products are computed together. Work per token grows with it, the number of steps in a row shrinks."""


def short_convolution(x: jax.Array, kernel: jax.Array, previous: jax.Array) -> jax.Array:
    """Convolve each channel along the token's own sequence: y_t = Σ_j kernel[-1 - j] · x of the j-th token before t.

    x: [B, T, channels]. kernel: [taps, channels]; the last tap multiplies the token itself.
    previous: int32 [B, T], from `previous_tokens`. Returns [B, T, channels].
    """
    at = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), previous.shape)
    y = x * kernel[-1]
    for tap in kernel[-2::-1]:
        at = jnp.where(at < 0, -1, jnp.take_along_axis(previous, jnp.maximum(at, 0), 1))
        read = jnp.take_along_axis(x, jnp.maximum(at, 0)[..., None], 1)
        y += jnp.where(at[..., None] < 0, 0, read) * tap
    return y


class Paths(NamedTuple):
    """Which tokens of a chunk precede which, and which states they start from; n chunks of C tokens, a power of 2.

    precedes: bool [B, n, C, C]: whether token j is token i, or before it in its sequence. carried, branched: bool
    [B, n, C]: whether the last token before the chunk in a token's sequence is the one right before the chunk, or an
    earlier end of a prefix. last, fork: bool [B, n, C]: the chunk's last token, and the last end of a prefix in it.
    """

    precedes: jax.Array
    carried: jax.Array
    branched: jax.Array
    last: jax.Array
    fork: jax.Array


def chunk_paths(positions: jax.Array, visible_until: jax.Array, chunk: int = CHUNK) -> Paths:
    """Find the paths of tokens in rows, int32 [B, T] as for `previous_tokens`, in chunks of at most `chunk` tokens."""
    time = positions.shape[1]
    chunk = min(chunk, 1 << (time - 1).bit_length())
    positions, visible_until = (jnp.pad(x, ((0, 0), (0, -time % chunk))) for x in (positions, visible_until))
    rows = len(positions)
    index = jnp.arange(positions.shape[1], dtype=jnp.int32).reshape(-1, chunk)
    until = visible_until.reshape(rows, -1, chunk)
    sees = (index[:, None, :] < index[:, :, None]) & (until[:, :, None, :] > index[:, :, None])
    precedes = sees | jnp.eye(chunk, dtype=bool)
    previous = previous_tokens(positions, visible_until)
    first = index[:, :1]
    known = previous.reshape(rows, -1, chunk)
    carried = known == first - 1
    outside = (known >= 0) & (known < first)
    # A prefix ends where the next token continues it and is visible to fewer than it is.
    ends = (jnp.roll(previous, -1, 1) == index.reshape(-1)) & (jnp.roll(visible_until, -1, 1) < visible_until)
    ends = ends.reshape(rows, -1, chunk)
    fork = ends & (jnp.flip(jnp.cumsum(jnp.flip(ends, 2), 2), 2) == 1)
    last = jnp.broadcast_to(index == jnp.minimum(index[:, -1:], time - 1), fork.shape)

    def inherited(flag: jax.Array) -> jax.Array:
        return (precedes & flag[:, :, None, :]).any(-1)

    return Paths(precedes, inherited(carried & outside), inherited(outside & ~carried), last, fork)


class Inputs(NamedTuple):
    """What the gated delta rule reads of tokens, […] being [B, T] or [B].

    q, k: [..., K, d], as the rule uses them (normalised, scaled). v: [..., K, G, e]; G value heads share a key head.
    log_decay: float32 [..., K, G], g_t ≤ 0, nats. beta: float32 [..., K, G].
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


def gated_delta_rule(
    inputs: Inputs, paths: Paths, state: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Compute o_t = S_t q_t with S_t = e^{g_t} S (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, where S is the state before t.

    paths: of the rows. state: float32 [B, K, G, d, e], from which rows of one sequence each continue; None: every tree
    starts from zero.
    Returns (float32 [B, T, K, G, e], the state after the last token, float32 [B, K, G, d, e]). Yang et al. 2024, "Gated
    Delta Networks", in chunks: within a chunk, the corrections δ_t = β_t (v_t − S k_t) solve one triangular system; a
    loop over chunks carries two states, after the last token and at the end of the last prefix. Memory grows with
    T · C.
    """
    time = inputs.q.shape[1]
    chunks, size = paths.last.shape[1:]

    def split(x: jax.Array) -> jax.Array:
        """[B, T, …] → float32 [B, n, C, …]."""
        padding = [(0, 0), (0, chunks * size - time)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x.astype(jnp.float32), padding).reshape(len(x), chunks, size, *x.shape[2:])

    inputs = Inputs(*map(split, inputs))
    again = functools.partial(jax.checkpoint, prevent_cse=False)  # what the backward pass computes again
    q, attention, chunk = again(_prepared, policy=jax.checkpoint_policies.save_only_these_names(INVERSE))(
        inputs, paths
    )
    empty = jnp.zeros((*chunk.v.shape[1:4], 2, chunk.k.shape[-1], chunk.v.shape[-1]), jnp.float32)
    first = empty if state is None else empty.at[:, :, :, 0].set(state)
    states, last = _run_chunks(first, chunk)
    out = again(_outputs)(q, attention, states, chunk)  # [n, B, K, G, C, e]
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(len(paths.last), -1, *out.shape[2:4], out.shape[-1])
    return out[:, :time], last[:, :, :, 0]


INVERSE = "inverse"


def _prepared(inputs: Inputs, paths: Paths) -> tuple[jax.Array, jax.Array, _Chunk]:
    """Compute what chunks need before the loop over them: queries [n, B, K, C, d], what each query takes of each key's
    correction [n, B, K, G, C, C], and `_Chunk`, stacked. inputs: float32 [B, n, C, …].
    """
    q, k = (jnp.moveaxis(x, 2, 3) for x in (inputs.q, inputs.k))  # [B, n, K, C, d]
    v, g, beta = (jnp.moveaxis(x, 2, 4) for x in (inputs.v, inputs.log_decay, inputs.beta))
    total = jnp.einsum("bnij,bnkgj->bnkgi", paths.precedes.astype(jnp.float32), g, precision="highest")
    between = total[..., :, None] - total[..., None, :]
    between = jnp.exp(jnp.where(paths.precedes[:, :, None, None], between, -jnp.inf))
    system = jnp.einsum("bnkid,bnkjd->bnkij", k, k)[:, :, :, None] * between * beta[..., None]
    attention = jnp.einsum("bnkid,bnkjd->bnkij", q, k)[:, :, :, None] * between
    # A token starts from one of the two states, or from neither.
    starts = jnp.stack([paths.carried, paths.branched], 2)[:, :, None, None] * jnp.exp(total)[..., None, :]
    ends = jnp.stack([paths.last, paths.fork], 2).astype(jnp.float32)
    kept = jnp.einsum("bnsi,bnkgti->bnkgst", ends, starts)  # the share of state t that state s keeps
    kept = kept.at[..., 1, 1].add(1.0 - paths.fork.any(-1)[:, :, None, None])
    inverse = checkpoint_name(_inverse(system), INVERSE)
    weights = jnp.einsum("bnsi,bnkgij->bnkgsj", ends, between)
    found = q, attention, _Chunk(k, v, beta, inverse, starts, weights, kept)
    return jax.tree.map(lambda x: x.swapaxes(0, 1), found)


def _outputs(q: jax.Array, attention: jax.Array, states: jax.Array, chunks: _Chunk) -> jax.Array:
    """Compute the outputs of all chunks, [n, B, K, G, C, e], from the states before them."""
    return _read(states, q, chunks.starts) + attention @ jax.vmap(_corrections)(states, chunks)


class _Chunk(NamedTuple):
    """A chunk of C tokens: k [B, K, C, d], v [B, K, G, C, e], β [B, K, G, C], the inverse of its system
    [B, K, G, C, C]; how much of each of the two states its tokens start from, [B, K, G, 2, C], how much of its
    corrections the next states have, likewise, and how much of the states, [B, K, G, 2, 2].
    """

    k: jax.Array
    v: jax.Array
    beta: jax.Array
    inverse: jax.Array
    starts: jax.Array
    weights: jax.Array
    kept: jax.Array


def _read(states: jax.Array, x: jax.Array, starts: jax.Array) -> jax.Array:
    """Multiply x, [..., K, C, d], by the states that tokens start from, [..., K, G, 2, d, e]: [..., K, G, C, e]."""
    both = jnp.einsum("...kcd,...kgsde->...kgsce", x, states)
    return both[..., 0, :, :] * starts[..., 0, :, None] + both[..., 1, :, :] * starts[..., 1, :, None]


def _corrections(states: jax.Array, chunk: _Chunk) -> jax.Array:
    """Compute the corrections of a chunk's tokens, [B, K, G, C, e], from the states before it."""
    return chunk.inverse @ (chunk.beta[..., None] * (chunk.v - _read(states, chunk.k, chunk.starts)))


def _next_states(states: jax.Array, chunk: _Chunk) -> jax.Array:
    """Compute the states after a chunk, [B, K, G, 2, d, e], affine in those before it."""
    delta = _corrections(states, chunk)
    # Not by broadcasting, whose gradient is a sum over two that crashes XLA (of jaxlib 0.10) on CPUs next to a product.
    added = jnp.stack([chunk.weights[..., i, :, None] * delta for i in range(2)], axis=3)
    made = jnp.einsum("bkcd,bkgsce->bkgsde", chunk.k, added)
    for i in range(2):
        made += chunk.kept[..., i, None, None] * states[:, :, :, i, None]
    return made


@jax.custom_vjp
def _run_chunks(first: jax.Array, chunks: _Chunk) -> tuple[jax.Array, jax.Array]:
    """Return the states before every chunk, [n, …], and after the last."""
    last, states = lax.scan(lambda states, chunk: (_next_states(states, chunk), states), first, chunks)
    return states, last


def _run_forward(first: jax.Array, chunks: _Chunk) -> tuple[Any, Any]:
    states, last = _run_chunks(first, chunks)
    return (states, last), (states, chunks)


def _run_backward(kept: Any, slopes: Any) -> tuple[jax.Array, Any]:
    """Loop over states alone; the slopes of all chunks are then computed together."""
    states, chunks = kept

    def step(after: jax.Array, x: Any) -> tuple[jax.Array, jax.Array]:
        own, chunk, slope = x
        return slope + jax.vjp(lambda states: _next_states(states, chunk), own)[1](after)[0], after

    first, after = lax.scan(step, slopes[1], (states, chunks, slopes[0]), reverse=True)

    def of_chunk(states: jax.Array, chunk: _Chunk, after: jax.Array) -> Any:
        return jax.vjp(lambda chunk: _next_states(states, chunk), chunk)[1](after)[0]

    return first, jax.vmap(of_chunk)(states, chunks, after)


_run_chunks.defvjp(_run_forward, _run_backward)


@jax.custom_vjp
def _inverse(system: jax.Array) -> jax.Array:
    """Invert lower triangular matrices with ones on the diagonal, [..., C, C], C a power of 2; what is on and above the
    diagonal is not read.

    Blocks of twice the size are inverted from those on their diagonal: [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0],
    [−D⁻¹ B A⁻¹, D⁻¹]]. This is as stable as substitution, and takes two products for each size.
    """
    index = np.arange(system.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(len(index), dtype=system.dtype), system.shape)
    half = 1
    while half < len(index):
        block = index // half
        below = jnp.where((block[:, None] == block + 1) & (block % 2 == 0), system, 0)
        inverse = inverse - _exact_product(_exact_product(inverse, below), inverse)
        half = 2 * half
    return inverse


def _exact_product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _inverse_forward(system: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(system)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, slope: jax.Array) -> tuple[jax.Array]:
    turned = inverse.swapaxes(-1, -2)
    return (-jnp.tril(_exact_product(_exact_product(turned, slope), turned), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


def next_state(state: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Compute one step of `gated_delta_rule`: (o float32 [B, K, G, e], the state after it).

    state: float32 [B, K, G, d, e]. inputs: of one token per row.
    """
    q, k, v = (x.astype(jnp.float32) for x in inputs[:3])
    state = state * jnp.exp(inputs.log_decay)[..., None, None]
    delta = (v - jnp.einsum("bkgde,bkd->bkge", state, k)) * inputs.beta[..., None]
    state = state + k[:, :, None, :, None] * delta[:, :, :, None]
    return jnp.einsum("bkgde,bkd->bkge", state, q), state
