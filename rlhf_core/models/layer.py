"""The decoder's layer: attention, or another mixer of tokens, then an MLP or experts.

A layer is a class, the kind `LAYER`: `config.layer` names it, and None stands for `Layer`. It is made once for all
layers that are alike, its parameters float32 [layers, …], and called with one layer's slice.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.errors import InputError
from rlhf_core.models.config import DecoderConfig
from rlhf_core.models.experts import Experts, Routed
from rlhf_core.models.layers import MLP, Attention, RMSNorm
from rlhf_core.models.readers import Aux, LayerContext, RowReader, SomeTokensReader, previous_tokens


class Recurrent(nnx.Module):
    """A mixer with a state, which tokens change one after the other, in place of attention.

    A state is any tree of arrays, [B, …]; all zeros before a sequence's first token. `next` returns the same tree, with
    the same shapes and dtypes, and its output in the dtype of `x`.

    A family implements `next`, and `empty` unless it has an `over_rows` of its own; what is here then computes rows
    token by token. One that computes many tokens at a time implements `over_rows` and `extend`, and `order`, if they
    read more of the rows.
    """

    exact: ClassVar[tuple[str, ...]] = ()
    """Names of parameters that stay float32 while decoding, where the others are in the dtype of the computation."""

    def empty(self, rows: int, dtype: Any) -> Any:
        """Return the state of so many rows before their first token; dtype: of the computation."""
        raise NotImplementedError

    def next(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Compute the output, [B, D], of one token per row, [B, D], and the state after it."""
        raise NotImplementedError

    @classmethod
    def order(cls, reader: RowReader) -> Any:
        """Compute, once for all layers of a pass, what `over_rows` has to know of its rows: here the index of the token
        before each one in its own sequence, int32 [B, T], -1 where it has none.
        """
        if reader.mesh is not None:
            raise InputError(f"mesh.context: {cls.__name__} computes whole rows; leave it out")
        return previous_tokens(reader.positions, reader.visible_until)

    def over_rows(self, x: jax.Array, order: Any) -> tuple[jax.Array, Any]:
        """Compute packed rows, [B, T, D] → the same, and the state after each row's last token.

        A sequence starts from no state. Sequences that share a prefix each go on from the state at its end.
        """
        empty = self.empty(len(x), x.dtype)
        steps = jnp.arange(x.shape[1])
        # The state after every token: one of an earlier token may be asked for again.
        states = jax.tree.map(lambda each: jnp.zeros((len(steps), *each.shape), each.dtype), empty)

        def step(states: Any, now: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            i, token, before = now

            def read(every: jax.Array) -> jax.Array:
                found = every[jnp.maximum(before, 0), jnp.arange(len(before))]
                return jnp.where(before.reshape(-1, *(1,) * (found.ndim - 1)) < 0, 0, found)

            out, state = self.next(token, jax.tree.map(read, states))
            return jax.tree.map(lambda every, one: every.at[i].set(one), states, state), out

        states, out = lax.scan(step, states, (steps, x.swapaxes(0, 1), order.T))
        return out.swapaxes(0, 1), jax.tree.map(lambda each: each[-1], states)

    def extend(self, x: jax.Array, state: Any, count: jax.Array) -> tuple[jax.Array, Any]:
        """Compute tokens that follow a state, [B, T, D]: the same, and the state after the first `count`, int32 [B]."""

        def step(state: Any, now: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            i, token = now
            out, after = self.next(token, state)

            def kept(new: jax.Array, old: jax.Array) -> jax.Array:
                return jnp.where((i < count).reshape(-1, *(1,) * (new.ndim - 1)), new, old)

            return jax.tree.map(kept, after, state), out

        state, out = lax.scan(step, state, (jnp.arange(x.shape[1]), x.swapaxes(0, 1)))
        return out.swapaxes(0, 1), state

    def __call__(self, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Any]:
        """[B, T, D] → the same, and the state after them."""
        return ctx.recur(self, x)

    @classmethod
    def heads(cls, config: DecoderConfig) -> int:
        """Return the number that devices that share the mixer while sampling must divide; 1: it is not shared."""
        return 1

    @classmethod
    def apart(cls, params: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
        """Return one layer's parameters of the mixer as it has them with `config.apart`, for devices that share it."""
        return params

    @classmethod
    def is_apart(cls, params: dict[str, Any]) -> bool:
        """Tell whether `apart` has made these parameters."""
        return False


class Layer(nnx.Module):
    """Attention or another mixer, and a gated MLP or experts; normalised before, after, or both.

    The norms have Hugging Face's names: where layers normalise before only, `post_attention_layernorm` is the MLP's.
    """

    mixer: ClassVar[Any] = Attention
    """The class of what mixes tokens: called with (its input [B, T, D], a `LayerContext`), it returns (its output, the
    layer's `Aux.cache`)."""
    name: ClassVar[str] = "self_attn"
    """Of the mixer, among the layer's parameters and in the files."""
    given: ClassVar[Any] = None
    """What makes the layers' own inputs, once for all: called with (tokens, int32 [B, T], their embeddings [B, T, D]),
    it returns [layers, B, T, size]. Its parameters are the model's `per_layer_inputs`. None: there are none."""
    about: ClassVar[str] = "attention"
    """How tokens are mixed, in words, for the table of families."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        norm = functools.partial(RMSNorm, config, (config.num_layers,), config.hidden_size)
        self.norms, self.residual_scale = config.norms, config.residual_scale
        setattr(self, self.name, self.mixer(config, rngs))
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)
        self.post_attention_layernorm = norm()
        if self.norms != "after":
            self.input_layernorm = norm()
        if self.norms == "both":
            self.pre_feedforward_layernorm = norm()
        if self.norms != "before":
            self.post_feedforward_layernorm = norm()

    def __call__(self, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Aux]:
        """[B, T, D] → the same, and what else comes of it."""
        mixed, cache = getattr(self, self.name)(self._normed(x), ctx)
        if self.norms == "before":
            x = x + self._scaled(mixed)
            computed, routed = self._feed_forward(self.post_attention_layernorm(x), ctx)
            return x + self._scaled(computed), Aux(cache, routed)
        x = x + self.post_attention_layernorm(mixed)
        inner = x if self.norms == "after" else self.pre_feedforward_layernorm(x)
        computed, routed = self._feed_forward(inner, ctx)
        return x + self.post_feedforward_layernorm(computed), Aux(cache, routed)

    def at(self, x: jax.Array, ctx: LayerContext, at: jax.Array) -> jax.Array:
        """Compute the output of the tokens `at` alone, int32 [B, n]: [B, n, D]; keys and values are those of all."""
        _, k, v, _ = self.self_attn.project(self._normed(x), ctx.rotation)
        assert isinstance(ctx.reader, RowReader)
        some = replace(
            ctx,
            reader=SomeTokensReader(rows=ctx.reader, at=at, k=k, v=v),
            rotation=jax.tree.map(lambda angle: take_rows(angle, at), ctx.rotation),
        )
        return self(take_rows(x, at), some)[0]

    def _feed_forward(self, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Routed | None]:
        if isinstance(self.mlp, Experts):
            return self.mlp(x, ctx.routing)
        return self.mlp(x), None

    def _normed(self, x: jax.Array) -> jax.Array:
        return x if self.norms == "after" else self.input_layernorm(x)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_scale == 1 else x * jnp.asarray(self.residual_scale, x.dtype)


def layer_of(config: DecoderConfig) -> Any:
    """Return the class of the layers that a configuration of one kind describes."""
    return config.layer or Layer


def has_state(config: DecoderConfig) -> bool:
    """Tell whether the layers keep a state in place of keys and values."""
    return issubclass(layer_of(config).mixer, Recurrent)


def take_rows(x: jax.Array, at: jax.Array) -> jax.Array:
    """Gather x[b, at[b, j]]: [B, T, …] → [B, n, …]."""
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)
