"""How rows are sorted by expert, and how devices along the mesh axis `expert` send each other tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.mesh import ROW_AXES
from rlhf_core.models.quantized import PlainScaled


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def taken(x: jax.Array, rows: jax.Array, place: jax.Array, k: int) -> jax.Array:
    """Take rows of x, [N, D], each k times, in an order: [N · k, D]. The gradient is taken in the same way, not added
    row by row.

    rows: int32 [N · k], a permutation of the pairs, of which pair n is row n // k of x. place: its inverse.
    """
    return x[rows // k]


def _taken_forward(x: jax.Array, rows: jax.Array, place: jax.Array, k: int) -> Any:
    return taken(x, rows, place, k), place


def _taken_backward(k: int, place: jax.Array, d_y: jax.Array) -> Any:
    d_x = d_y[place]
    if k > 1:
        d_x = d_x.reshape(len(d_x) // k, k, -1).astype(jnp.float32).sum(1).astype(d_y.dtype)
    return d_x, None, None


taken.defvjp(_taken_forward, _taken_backward)


COUNTED = 128
"""Rows that are compared with each other to rank them."""


def by_expert(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort rows by expert, those of an expert in their order: the rows' indices, sorted; where each row is among them,
    int32 [N] both; and the rows of each expert, int32 [experts].

    ids: int32 [N], from 0 to experts - 1; N · experts is below 2³². There is one sort, of one array, and
    places are counted: the TPU compiler takes half a minute for each sort of 100,000 pairs of numbers.
    """
    rows = len(ids)
    fill = -len(ids) % COUNTED
    keys = ids.astype(jnp.uint32) * rows + jnp.arange(rows, dtype=jnp.uint32)
    order = (lax.sort(keys, is_stable=False) % rows).astype(jnp.int32)
    each = jnp.pad(ids, (0, fill), constant_values=experts).reshape(-1, COUNTED)
    counts = (each[:, :, None] == jnp.arange(experts)).sum(1, dtype=jnp.int32)
    total = counts.sum(0)
    # Before a row are those of lower experts, those of its expert in earlier blocks, and some of its own block.
    begin = (jnp.cumsum(total) - total) + (jnp.cumsum(counts, 0) - counts)
    earlier = jnp.tril(each[:, :, None] == each[:, None], -1).sum(2, dtype=jnp.int32)
    place = jnp.take_along_axis(begin, each, 1, mode="clip") + earlier
    return order, place.reshape(-1)[:rows], total


CAPACITY = 2
"""Pairs that a device sends to another in one round, in multiples of an even share."""


def room(pairs: int, devices: int) -> int:
    """Count the pairs, of those of a device, that it sends each of the devices in one round."""
    return min(8 * math.ceil(CAPACITY * pairs / (8 * devices)), pairs)


@dataclass(frozen=True)
class Exchange:
    """How devices along `expert` send tokens to the experts, and get their outputs back.

    Every device sorts its pairs of token and expert, and sends each of the others at most `capacity` of them a round;
    another round follows while any device has pairs left, so that no token is dropped. Unless one device's experts get
    CAPACITY times the even share, there is one round. Buffers have devices · capacity rows, whatever the router does.
    The backward pass sends the tokens again, with the gradients of the outputs, so that nothing of this is kept.
    """

    mlp: Callable[..., jax.Array]
    devices: int
    experts: int
    """Per device."""
    per_token: int
    capacity: int

    def rounds(self, ids: jax.Array) -> jax.Array:
        """Count the rounds that the busiest device needs. ids: int32 [N], the experts of pairs, ascending."""
        ends = jnp.searchsorted(ids, jnp.arange(self.devices + 1) * self.experts)
        return lax.pmax(-(-jnp.diff(ends).max() // self.capacity), (*ROW_AXES, "context"))

    def slots(self, ids: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose the pairs of a round: int32 [devices · capacity], their indices; bool, whether there is one."""
        ends = jnp.searchsorted(ids, jnp.arange(self.devices + 1) * self.experts)
        at = ends[:-1, None] + number * self.capacity + jnp.arange(self.capacity)
        there = at < ends[1:, None]
        return jnp.where(there, at, len(ids)).reshape(-1), there.reshape(-1)

    def received(self, ids: jax.Array, number: jax.Array, back: jax.Array, whole: jax.Array) -> jax.Array:
        """Put what came back in a round, [devices · capacity, D], in its place among all pairs, [N, D]."""
        ends = jnp.searchsorted(ids, jnp.arange(self.devices + 1) * self.experts)
        device = ids // self.experts
        rank = jnp.arange(len(ids)) - ends[device] - number * self.capacity
        there = (rank >= 0) & (rank < self.capacity)
        slot = jnp.where(there, device * self.capacity + rank, 0)
        return jnp.where(there[:, None], back[slot], whole)

    def sent(self, x: jax.Array) -> jax.Array:
        """Send the parts of x, [devices · capacity, …], to the devices in order, and return what they sent."""
        return lax.all_to_all(x, "expert", 0, 0, tiled=True)

    def arrived(self, ids: jax.Array, at: jax.Array, there: jax.Array) -> tuple[jax.Array, ...]:
        """Sort what arrives by expert: int32 [rows], its order, and where each row is in it; rows per expert; bool
        [rows, 1], the used ones.
        """
        own = self.sent(jnp.where(there, ids.at[at].get(mode="clip") % self.experts, self.experts))
        order, place, counts = by_expert(own, self.experts + 1)
        used = (jnp.arange(len(own)) < counts[:-1].sum())[:, None]
        return order, place, counts[:-1], used


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchanged(
    exchange: Exchange,
    x: jax.Array,
    pairs: tuple[jax.Array, jax.Array, jax.Array],
    kernels: Any,
    biases: Any,
    weights: Any,
) -> jax.Array:
    """Compute the output of each pair's expert, [N · k, D], by expert, on the devices that have the experts.

    x: [N, D]. pairs: int32 [N · k] each, the pairs by expert, where each is in this order, and their experts in it.
    kernels, biases, weights: of this device's experts, as for `_mlp`.
    """
    (order, _, ids), weights = pairs, {**kernels, **weights}

    def one(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, made = state
        at, there = exchange.slots(ids, number)
        token = order.at[at].get(mode="clip") // exchange.per_token
        by_expert, place, counts, used = exchange.arrived(ids, at, there)
        got = exchange.sent(jnp.where(there[:, None], x[token], 0))
        out = exchange.mlp(got[by_expert], counts, used, weights, biases, {})
        back = exchange.sent(out[place])
        return number + 1, exchange.received(ids, number, back, made)

    rounds = exchange.rounds(ids)
    start = jnp.zeros((len(ids), x.shape[1]), x.dtype)
    made: jax.Array = lax.while_loop(lambda state: state[0] < rounds, one, (jnp.int32(0), start))[1]
    return made


def _exchanged_forward(
    exchange: Exchange, x: jax.Array, pairs: Any, kernels: Any, biases: Any, weights: Any
) -> tuple[jax.Array, Any]:
    made = exchanged(exchange, x, pairs, kernels, biases, weights)
    return made, (x, pairs, biases, {**kernels, **weights})


def _exchanged_backward(exchange: Exchange, residuals: Any, d_made: jax.Array) -> Any:
    x, (order, place_of_pair, ids), biases, weights = residuals
    trained = {name: w for name, w in weights.items() if not isinstance(w, PlainScaled)}
    unused = jax.tree.map(
        lambda w: jnp.zeros(w.shape, jnp.float32), trained
    )  # kernels, which only get gradients

    def one(state: Any) -> Any:
        number, d_pairs, d_kernels, d_biases = state
        at, there = exchange.slots(ids, number)
        token = order.at[at].get(mode="clip") // exchange.per_token
        by_expert, place, counts, used = exchange.arrived(ids, at, there)
        both = jnp.concatenate([x[token], d_made.at[at].get(mode="clip")], 1)
        got = exchange.sent(jnp.where(there[:, None], both, 0))[by_expert]
        inputs, d_out = jnp.split(got, 2, axis=1)
        pull = jax.vjp(
            lambda inputs, kernels, biases: exchange.mlp(
                inputs, counts, used, {**weights, **kernels}, biases, trained
            ),
            inputs,
            unused,
            biases,
        )[1]
        d_inputs, *more = pull(d_out)
        back = exchange.sent(d_inputs[place])
        add = functools.partial(jax.tree.map, jnp.add)
        d_pairs = exchange.received(ids, number, back, d_pairs)
        return number + 1, d_pairs, *map(add, (d_kernels, d_biases), more)

    rounds = exchange.rounds(ids)
    start = (
        jnp.int32(0),
        jnp.zeros(d_made.shape, d_made.dtype),
        unused,
        jax.tree.map(jnp.zeros_like, biases),
    )
    _, d_pairs, d_kernels, d_biases = lax.while_loop(lambda state: state[0] < rounds, one, start)
    d_x, *_ = _taken_backward(exchange.per_token, place_of_pair, d_pairs)
    return d_x, None, {name: d_kernels.get(name) for name in weights}, d_biases, None


exchanged.defvjp(_exchanged_forward, _exchanged_backward)
