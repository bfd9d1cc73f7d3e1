"""Mixers with a state: short convolutions between gates (LFM2), and the gated delta rule (Qwen3.5)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh

from rlhf_core.models import (
    DecoderConfig,
    Linear,
    Recurrent,
    RMSNorm,
    RowReader,
    across_pieces,
    previous_tokens,
)
from rlhf_families.recurrence import (
    Inputs,
    Paths,
    chunk_paths,
    gated_delta_rule,
    next_state,
    short_convolution,
)


class TokenOrder(NamedTuple):
    """The order of tokens in rows: what `previous_tokens` and `chunk_paths` return; the mesh, if layers get pieces of
    these rows.
    """

    previous: jax.Array
    paths: Paths
    mesh: AbstractMesh | None = None


class JointProjection(Recurrent):
    """What `Convolution` and `DeltaNet` have: one projection to several kinds of channels, which devices that share the
    mixer keep apart.
    """

    together: ClassVar[str]
    """The name of the projection to all channels."""
    kinds: ClassVar[tuple[str, ...]]
    """Of the projections to each kind of channels, after `in_proj_`."""

    @classmethod
    def part_sizes(cls, config: DecoderConfig) -> tuple[int, ...]:
        """Count the channels of each kind."""
        raise NotImplementedError

    @classmethod
    def order(cls, reader: RowReader) -> TokenOrder:
        rows = reader.positions, reader.visible_until
        return TokenOrder(previous_tokens(*rows), chunk_paths(*rows), reader.mesh)

    def make_parts(self, config: DecoderConfig, linear: Any) -> None:
        """Set the projection, or with `config.apart` the projections to each kind."""
        self.sizes = self.part_sizes(config)
        parts = {self.together: sum(self.sizes)}
        if config.apart:
            named = [f"in_proj_{kind}" for kind in self.kinds]
            parts = dict(zip(named, self.sizes, strict=True))
        for name, size in parts.items():
            axes = ("layers", "embed", shared_axis(config))
            setattr(self, name, linear((config.hidden_size, size), axes=axes))
        self.parts = tuple(parts)

    def projected(self, x: jax.Array) -> list[jax.Array]:
        """Project to the channels of each kind."""
        made = [getattr(self, name)(x) for name in self.parts]
        if len(made) > 1:
            return made
        return jnp.split(made[0], np.cumsum(self.sizes)[:-1], axis=-1)

    @classmethod
    def apart(cls, params: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
        ends = np.cumsum(cls.part_sizes(config))[:-1]
        inside = {name: value for name, value in params.items() if name != cls.together}
        pieces = {name: jnp.split(x, ends, axis=-1) for name, x in params[cls.together].items()}
        for i, kind in enumerate(cls.kinds):
            inside[f"in_proj_{kind}"] = {name: x[i] for name, x in pieces.items()}
        if "conv1d" in inside:
            weights = jnp.split(inside["conv1d"]["weight"], ends)
            inside["conv1d"] = {f"weight_{i}": weight for i, weight in enumerate(weights)}
        return inside

    @classmethod
    def is_apart(cls, params: dict[str, Any]) -> bool:
        return f"in_proj_{cls.kinds[0]}" in params


def shared_axis(config: DecoderConfig) -> str | None:
    """Return the logical axis of channels and heads: devices share them while they sample."""
    return "heads" if config.apart else None


class ConvolutionSettings(NamedTuple):
    """A convolution over `taps` tokens, with biases of it and of the projections or without."""

    taps: int
    bias: bool


class Convolution(JointProjection):
    """A short convolution between two gates (LFM2). Its state: the last inputs of the convolution, [B, taps - 1, D]."""

    together = "in_proj"
    kinds = ("before", "after", "inner")

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c, own = config, config.settings
        linear = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range, bias=own.bias)
        self.make_parts(c, linear)
        self.conv = Taps(c, (c.hidden_size,), own.taps, rngs, bias=own.bias)
        self.out_proj = linear((c.hidden_size, c.hidden_size), ("layers", shared_axis(c), "embed"), sums=True)

    @classmethod
    def part_sizes(cls, config: DecoderConfig) -> tuple[int, ...]:
        return (config.hidden_size,) * 3

    @classmethod
    def heads(cls, config: DecoderConfig) -> int:
        return config.hidden_size

    def over_rows(self, x: jax.Array, order: TokenOrder) -> tuple[jax.Array, Any]:
        before, after, x = self.projected(x)
        mixed, kept = self.conv.over_rows(before * x, order)
        return self.out_proj(after * mixed), kept

    def extend(self, x: jax.Array, state: Any, count: jax.Array) -> tuple[jax.Array, Any]:
        before, after, x = self.projected(x)
        mixed, kept = self.conv.extend(before * x, state, count)
        return self.out_proj(after * mixed), kept

    def next(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        before, after, x = self.projected(x)
        mixed, kept = self.conv.next(before * x, state)
        return self.out_proj(after * mixed), kept


class Taps(nnx.Module):
    """A convolution of every channel with the tokens before it; parameters as in Hugging Face's files."""

    def __init__(
        self, config: DecoderConfig, channels: Sequence[int], taps: int, rngs: Any, *, bias: bool = False
    ) -> None:
        """channels: of each kind. With `config.apart`, each kind has weights of its own, weight_0 and so on."""
        parts = {"weight": sum(channels)}
        if config.apart and len(channels) > 1:
            parts = {f"weight_{i}": size for i, size in enumerate(channels)}
        for name, size in parts.items():
            shape = (config.num_layers, size, 1, taps)
            bound = taps**-0.5
            start = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
            setattr(self, name, nnx.Param(start, axes=("layers", shared_axis(config), None, None)))
        zero = jnp.zeros((config.num_layers, sum(channels)), jnp.float32)
        self.bias = nnx.Param(zero, axes=("layers", shared_axis(config))) if bias else None
        self.parts = tuple(parts)

    def kernel(self, dtype: Any) -> jax.Array:
        """Return the taps, [taps, channels]."""
        return jnp.concatenate([getattr(self, name)[...][:, 0] for name in self.parts]).T.astype(dtype)

    def over_rows(self, x: jax.Array, order: TokenOrder) -> tuple[jax.Array, jax.Array | None]:
        """[B, T, channels] → the same, and the last inputs of each row, [B, taps - 1, channels]; None for pieces."""
        kernel = self.kernel(x.dtype)
        if order.mesh is not None:

            def convolve(x: jax.Array, taps: jax.Array, previous: jax.Array) -> jax.Array:
                return short_convolution(x, taps.T, previous)

            return self._biased(across_pieces(convolve, order.mesh, x, kernel.T, order.previous)), None
        at = jnp.full((len(x), 1), x.shape[1] - 1, jnp.int32)
        kept = []
        for _ in range(len(kernel) - 1):
            read = jnp.take_along_axis(x, jnp.maximum(at, 0)[..., None], 1)
            kept.append(jnp.where(at[..., None] < 0, 0, read))
            at = jnp.where(at < 0, -1, jnp.take_along_axis(order.previous, jnp.maximum(at, 0), 1))
        # The backward pass reads the taps' inputs again: it would keep a copy for each tap.
        y = jax.checkpoint(short_convolution, prevent_cse=False)(x, kernel, order.previous)
        return self._biased(y), jnp.concatenate(kept[::-1], 1)

    def extend(self, x: jax.Array, kept: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, T, channels] → the same, and the last inputs after the first `count` tokens, int32 [B]."""
        window = jnp.concatenate([kept, x], 1)
        kernel = self.kernel(x.dtype)
        y = sum(window[:, i : i + x.shape[1]] * tap for i, tap in enumerate(kernel))
        at = count[:, None] + jnp.arange(kept.shape[1])
        return self._biased(y), jnp.take_along_axis(window, at[..., None], 1)

    def next(self, x: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, channels] → the same, and the next last inputs."""
        window = jnp.concatenate([kept, x[:, None]], 1)
        y = jnp.einsum("btc,tc->bc", window, self.kernel(x.dtype))
        return self._biased(y), window[:, 1:]

    def _biased(self, y: jax.Array) -> jax.Array:
        return y if self.bias is None else (y + self.bias[...]).astype(y.dtype)


class DeltaSettings(NamedTuple):
    """The gated delta rule behind a convolution over `taps` tokens; sizes are of one head."""

    taps: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


class DeltaNet(JointProjection):
    """The gated delta rule (Yang et al. 2024) as in Qwen3.5.

    Its state: the last inputs of the convolution, [B, taps - 1, channels], and float32 [B, K, G, d, e], of K key heads,
    G value heads for each, d and e the sizes of a key and of a value.
    """

    together = "in_proj_qkv"
    kinds = ("q", "k", "v")
    exact = ("A_log", "dt_bias")

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c, own, lead = config, config.settings, (config.num_layers,)
        linear = functools.partial(Linear, rngs, lead, std=c.initializer_range, bias=False)
        inside = ("layers", "embed", shared_axis(c))
        values = own.value_heads * own.value_size
        self.make_parts(c, linear)
        self.in_proj_z = linear((c.hidden_size, values), axes=inside)
        self.in_proj_b = linear((c.hidden_size, own.value_heads), axes=inside)
        self.in_proj_a = linear((c.hidden_size, own.value_heads), axes=inside)
        self.conv1d = Taps(c, self.sizes, own.taps, rngs)
        heads = ("layers", shared_axis(c))
        self.dt_bias = nnx.Param(jnp.ones((*lead, own.value_heads), jnp.float32), axes=heads)
        decay = jax.random.uniform(rngs.params(), (*lead, own.value_heads), jnp.float32, 0.01, 16)
        self.A_log = nnx.Param(jnp.log(decay), axes=heads)
        self.norm = RMSNorm(replace(c, norm_offset=0.0), lead, own.value_size)
        self.out_proj = linear((values, c.hidden_size), axes=("layers", shared_axis(c), "embed"), sums=True)
        self.settings = own

    @classmethod
    def part_sizes(cls, config: DecoderConfig) -> tuple[int, ...]:
        own: DeltaSettings = config.settings
        keys = own.key_heads * own.key_size
        return (keys, keys, own.value_heads * own.value_size)

    @classmethod
    def heads(cls, config: DecoderConfig) -> int:
        own: DeltaSettings = config.settings
        return own.key_heads

    def over_rows(self, x: jax.Array, order: TokenOrder) -> tuple[jax.Array, Any]:
        mixed, kept = self.conv1d.over_rows(jnp.concatenate(self.projected(x), -1), order)
        inputs = self._inputs(mixed, x)
        if order.mesh is None:
            out, state = gated_delta_rule(inputs, order.paths)
        else:

            def of_heads(inputs: Inputs, _: Any, paths: Paths) -> jax.Array:
                return gated_delta_rule(inputs, paths)[0]

            out = across_pieces(of_heads, order.mesh, inputs, (), order.paths)
            state = None
        return self._output(out, x), (kept, state)

    def extend(self, x: jax.Array, state: Any, count: jax.Array) -> tuple[jax.Array, Any]:
        mixed, kept = self.conv1d.extend(jnp.concatenate(self.projected(x), -1), state[0], count)
        inputs = self._inputs(mixed, x)
        place = jnp.arange(x.shape[1])
        used = (place < count[:, None])[..., None, None]
        # A token without decay and correction leaves the state as it was.
        inputs = inputs._replace(
            log_decay=jnp.where(used, inputs.log_decay, 0), beta=jnp.where(used, inputs.beta, 0)
        )
        positions = jnp.broadcast_to(place.astype(jnp.int32), x.shape[:2])
        paths = chunk_paths(positions, jnp.full_like(positions, x.shape[1]))
        paths = paths._replace(carried=jnp.ones_like(paths.carried))
        out, after = gated_delta_rule(inputs, paths, state[1])
        return self._output(out, x), (kept, after)

    def next(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        mixed, kept = self.conv1d.next(jnp.concatenate(self.projected(x), -1), state[0])
        out, after = next_state(state[1], self._inputs(mixed, x))
        return self._output(out, x), (kept, after)

    def _inputs(self, mixed: jax.Array, x: jax.Array) -> Inputs:
        """[…, channels] after the convolution, [..., D] → queries, keys, values, logarithm of the decay, beta."""
        own, lead = self.settings, x.shape[:-1]
        size = own.key_size
        width = own.value_size
        groups = own.value_heads // own.key_heads
        key_heads = mixed.shape[-1] // (2 * size + groups * width)  # of this device
        q, k, v = jnp.split(jax.nn.silu(mixed), (key_heads * size, 2 * key_heads * size), axis=-1)
        q, k = (_unit(y.reshape(*lead, key_heads, size).astype(jnp.float32)) for y in (q, k))
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        decay = -jnp.exp(self.A_log[...]) * jax.nn.softplus(
            self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...]
        )
        decay, beta = (y.reshape(*lead, key_heads, groups) for y in (decay, beta))
        return Inputs(q * size**-0.5, k, v.reshape(*lead, key_heads, groups, width), decay, beta)

    def _output(self, out: jax.Array, x: jax.Array) -> jax.Array:
        gate = jax.nn.silu(self.in_proj_z(x).astype(jnp.float32)).reshape(out.shape)
        gated = self.norm(out) * gate
        return self.out_proj(gated.reshape(*x.shape[:-1], -1).astype(x.dtype))


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)
