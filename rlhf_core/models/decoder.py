"""One decoder-only transformer for all families of `families.ARCHITECTURES`: the functions of their `ModelFamily`.

Parameters are a nested dict under Hugging Face's names, with `kernel` [in, out] for a linear layer; layers are stacked,
float32 [layers, …]. The dict is merged with the cached module definition inside jit, which costs nothing at run time.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.errors import InputError
from rlhf_core.models.attention import attend, attend_at, attend_cached
from rlhf_core.models.config import DecoderConfig, Kind, kinds, remat_policy
from rlhf_core.models.layers import Embedding, Layer, Linear, RMSNorm
from rlhf_core.models.lora import Lora, merge
from rlhf_core.models.rope import rotation, shared_rotation
from rlhf_core.runtime.devices import device_count, platform

Params = dict[str, Any]
UNROLLED_LAYERS = 8
"""Up to this many layers are unrolled where all activations are kept: nothing is copied into or out of stacked ones."""


class Cache(NamedTuple):
    """The KV cache of a batch, in the layouts that a single query reads fastest; S is the cache length.

    One array per layer, so that writing a token touches nothing else: keys [B, kv heads, head_dim, S] and values
    [B, kv heads, S, head_dim], both in the compute dtype; positions int32 [B, S].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    positions: jax.Array


class Decoder(nnx.Module):
    """The parameters of the trunk, and of the language-model or reward head."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        head = functools.partial(Linear, rngs, (), std=config.initializer_range, bias=False)
        self.embed_tokens = Embedding(config, rngs)
        self.layers = Layer(config, rngs)
        self.norm = RMSNorm(config, (), config.hidden_size)
        if config.head == "score":
            self.score = head((config.hidden_size, 1), axes=("embed", None))
        elif not config.tied:
            self.lm_head = head((config.hidden_size, config.vocab_size), axes=("embed", "vocab"))
        if config.lora is not None:
            for target in config.lora.targets:
                functools.reduce(getattr, target.split("."), self.layers).adapt(config.lora, rngs)


def compute_dtype(config: DecoderConfig) -> Any:
    return jnp.dtype(config.dtype or ("float32" if platform() == "cpu" else "bfloat16"))


def _check_length(config: DecoderConfig, length: int) -> None:
    """Raise InputError for rows or caches longer than a longrope rotary embedding covers."""
    limits = [rope.original_length for rope in config.ropes if rope.kind == "longrope"]
    if limits and length > min(limits):
        raise InputError(
            f"rows of {length} tokens are longer than the original_max_position_embeddings of this model's longrope, "
            f"{min(limits)}, beyond which it rotates positions differently; keep sequences and rows within them"
        )


@functools.cache
def _definition(config: DecoderConfig) -> tuple[Any, Params, Params]:
    """Return the module without its arrays, the arrays' shapes, and their logical axes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    names = jax.tree.map(
        lambda variable: variable.get_metadata("axes"), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(names)


@functools.cache
def _parts(config: DecoderConfig) -> tuple[Any, Any, Any]:
    """Return embedding, one layer and last norm without their arrays, as `prepare` lays them out."""
    prepared = replace(config, lora=None, fused=config.fused or _joins())
    whole = nnx.eval_shape(lambda: Decoder(prepared, nnx.Rngs(0)))
    embed, block, norm = (nnx.split(part)[0] for part in (whole.embed_tokens, whole.layers, whole.norm))
    return embed, block, norm


def adapt(config: DecoderConfig, lora: Lora | None) -> DecoderConfig:
    """Return the config with these adapters, or without any."""
    return replace(config, lora=lora)


def abstract(config: DecoderConfig) -> Params:
    """Return the parameters' shapes, jax.ShapeDtypeStruct float32."""
    return _definition(config)[1]


def axes(config: DecoderConfig) -> Params:
    """Return the parameters' logical axes, a tuple of names per leaf."""
    return _definition(config)[2]


def init(config: DecoderConfig, key: jax.Array) -> Params:
    """Draw parameters, float32: normal(0, initializer_range) for matrices, factors of 1 for norms, 0 for biases."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=key))))


def _forward(
    config: DecoderConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    *,
    keep: bool = False,
    at: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Compute (hidden states [B, T, D] after the last norm, or [B, n, D] of the tokens `at`, int32 [B, n]; with `keep`,
    every layer's keys and values as in Cache, else None).
    """
    c, dtype = config, compute_dtype(config)
    _check_length(c, tokens.shape[1])
    decoder: Decoder = nnx.merge(_definition(c)[0], params)
    ropes = [shared_rotation(rope, c.head_dim, positions) for rope in c.ropes]
    several = jax.tree.map(lambda *each: jnp.stack(each), *ropes) if c.layer_ropes else None

    def body(x: jax.Array, slice_: tuple[Any, Kind]) -> tuple[jax.Array, Any]:
        layer, kind = nnx.merge(graph, slice_[0]), slice_[1]
        rope = ropes[0] if several is None else jax.tree.map(lambda each: each[kind.rope], several)
        q, k, v = layer.project(x, rope)
        mixed = over(q, k, v, positions, visible_until, window=kind.window, softcap=c.attention_softcap)
        return layer.finish(x, mixed), (k.swapaxes(2, 3), v) if keep else None

    over = c.attention or attend
    graph, state = nnx.split(decoder.layers)
    x = decoder.embed_tokens(tokens, dtype)
    policy = remat_policy(c, tokens.size, dtype.itemsize)
    if policy is not None:
        # Scanned: in unrolled layers, XLA on CPU merges the recomputation with the first computation.
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    layers, unroll = (nnx.to_pure_dict(state), kinds(c)), policy is None and c.num_layers <= UNROLLED_LAYERS
    if at is None or not unroll:
        x, kept = lax.scan(body, x, layers, unroll=unroll)
        return decoder.norm(x if at is None else _read(x, at)), kept
    # The last layer computes keys and values of all tokens, and everything else only for `at`.
    x, _ = lax.scan(body, x, jax.tree.map(lambda each: each[:-1], layers), unroll=True)
    last, kind = jax.tree.map(lambda each: each[-1], layers)
    layer = nnx.merge(graph, last)
    rope = ropes[0] if several is None else jax.tree.map(lambda each: each[kind.rope], several)
    _, k, v = layer.project(x, rope)
    x, rope = _read(x, at), jax.tree.map(lambda angle: _read(angle, at), rope)
    q, cap = layer.project(x, rope)[0], c.attention_softcap
    mixed = attend_at(q, k, v, at, positions, visible_until, window=kind.window, softcap=cap)
    return decoder.norm(layer.finish(x, mixed)), None


def hidden(
    config: DecoderConfig, params: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
) -> jax.Array:
    """Compute hidden states [rows, time, hidden] after the last norm, compute dtype, from int32 [rows, time]."""
    return _forward(config, params, tokens, positions, visible_until)[0]


def hidden_at(
    config: DecoderConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    at: jax.Array,
) -> jax.Array:
    """Compute `hidden` at the indices `at`, int32 [rows, n]: [rows, n, hidden]."""
    return _forward(config, params, tokens, positions, visible_until, at=at)[0]


def _read(x: jax.Array, at: jax.Array) -> jax.Array:
    """Gather x[b, at[b, j]]: [B, T, …] → [B, n, …]."""
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)


def unembedding(config: DecoderConfig, params: Params) -> tuple[jax.Array, float | None]:
    """Return (kernel [hidden, vocab] float32, soft cap or None): logits are cap(hidden · kernel)."""
    kernel = params["embed_tokens"]["embedding"].T if config.tied else params["lm_head"]["kernel"]
    return kernel, config.logit_softcap


def score(config: DecoderConfig, params: Params, hidden_states: jax.Array) -> jax.Array:
    """Compute rewards, float32 [...], of hidden states [..., hidden], in float32."""
    # By default, accelerators round a product's float32 inputs to TF32 or bfloat16.
    return jnp.matmul(
        hidden_states.astype(jnp.float32), params["score"]["kernel"][:, 0], precision=lax.Precision.HIGHEST
    )


def prefill(
    config: DecoderConfig, params: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
) -> tuple[jax.Array, Cache]:
    """Compute (hidden states as `hidden`, the cache of these tokens)."""
    states, (keys, values) = _forward(config, params, tokens, positions, visible_until, keep=True)
    return states, Cache(tuple(keys), tuple(values), positions)


def ring(config: DecoderConfig, cache: Cache, length: int, slot: jax.Array | int) -> Cache:
    """Turn a cache into a ring of `length` slots, its last token in slot - 1, those before it in the slots before."""
    _check_length(config, length)

    def rolled(x: jax.Array, axis: int) -> jax.Array:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (length - x.shape[axis], 0)
        return jnp.roll(jnp.pad(x, padding), slot, axis)

    return Cache(
        tuple(rolled(layer, 3) for layer in cache.keys),
        tuple(rolled(layer, 2) for layer in cache.values),
        rolled(cache.positions, 1),
    )


def prepare(config: DecoderConfig, params: Params) -> Params:
    """Lay the parameters out as `decode` reads them fastest: a dict per layer, in the compute dtype, adapters merged,
    projections of the same input joined.

    Slicing stacked parameters inside a loop copies every weight for every token; XLA does not hoist that.
    """
    dtype = compute_dtype(config)

    def one(i: int) -> Params:
        layer = jax.tree.map(lambda x: x[i], params["layers"])
        whole = layer if config.lora is None else merge(layer, config.lora.scale)
        cast = jax.tree.map(lambda x: x.astype(dtype), whole)
        return _joined(cast) if _joins() and not config.fused else cast

    return {**params, "layers": tuple(map(one, range(config.num_layers)))}


def _joins() -> bool:
    """Whether `prepare` joins projections: on several devices, their shards would not lie side by side."""
    return device_count() == 1


def _joined(layer: Params) -> Params:
    """Join the parameters of a layer's separate projections into those of a fused layer."""
    layer = {**layer}
    for module, together, parts in (
        ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
    ):
        inside = layer[module]
        if parts[0] in inside:  # absent in experts
            each = [inside[part] for part in parts]
            whole = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *each)
            layer[module] = {k: v for k, v in inside.items() if k not in parts} | {together: whole}
    return layer


def decode(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    visible: jax.Array,
    slot: jax.Array | int,
) -> tuple[jax.Array, Cache]:
    """Decode one token per row, written at cache index `slot`: (hidden [B, hidden], cache).

    params: from `prepare`, or plain ones. tokens, positions: int32 [B]. visible: bool [B, cache_length], the slots that
    a row's token sees, its own included.
    """
    weights = params if isinstance(params["layers"], tuple) else prepare(config, params)
    embed, block, norm = _parts(config)
    at = positions[:, None]
    ropes = [rotation(rope, config.head_dim, at) for rope in config.ropes]
    known = lax.dynamic_update_slice(cache.positions, at, (0, slot))
    x = nnx.merge(embed, weights["embed_tokens"])(tokens[:, None], compute_dtype(config))
    keys, values = [], []
    for i, (parameters, window) in enumerate(zip(weights["layers"], config.windows, strict=True)):
        layer = nnx.merge(block, parameters)
        q, k, v = layer.project(x, ropes[config.layer_ropes[i] if config.layer_ropes else 0])
        keys.append(lax.dynamic_update_slice(cache.keys[i], k.swapaxes(2, 3), (0, 0, 0, slot)))
        values.append(lax.dynamic_update_slice(cache.values[i], v, (0, 0, slot, 0)))
        seen = visible & (at - known < window) if window else visible
        mixed = attend_cached(q[:, :, :, 0], keys[-1], values[-1], seen, config.attention_softcap)
        x = layer.finish(x, mixed[:, None])
    return nnx.merge(norm, weights["norm"])(x)[:, 0], Cache(tuple(keys), tuple(values), known)
