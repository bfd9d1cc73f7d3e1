"""One decoder-only transformer for all families of `families.ARCHITECTURES`: the functions of their `ModelFamily`.

Parameters are a nested dict under Hugging Face's names, with `kernel` [in, out] for a linear layer; layers are stacked,
float32 [layers, …]. The dict is merged with the cached module definition inside jit, which costs nothing at run time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from rlhf_core.contracts import TensorParallel
from rlhf_core.errors import InputError
from rlhf_core.mesh import row_parts
from rlhf_core.models.attention import attend, attend_at, attend_cached, attend_continued, attend_groups
from rlhf_core.models.config import DecoderConfig, Kind, kinds, remat_policy
from rlhf_core.models.layers import Embedding, Layer, Linear, RMSNorm
from rlhf_core.models.lora import Lora, merge
from rlhf_core.models.rope import rotation, shared_rotation
from rlhf_core.runtime.caches import cached
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


@cached
def _definition(config: DecoderConfig) -> tuple[Any, Params, Params]:
    """Return the module without its arrays, the arrays' shapes, and their logical axes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    names = jax.tree.map(
        lambda variable: variable.get_metadata("axes"), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(names)


@cached
def _parts(config: DecoderConfig, fused: bool) -> tuple[Any, Any, Any]:
    """Return embedding, one layer and last norm without their arrays. fused: whether projections are joined."""
    prepared = replace(config, lora=None, fused=fused)
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
    policy = remat_policy(c, tokens.size * row_parts(), dtype.itemsize)
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
    """Compute (hidden states as `hidden`, the cache of these tokens). params: from `prepare`, or plain ones."""
    if isinstance(params["layers"], tuple):
        return _prefill_prepared(config, params, tokens, positions, visible_until)
    states, (keys, values) = _forward(config, params, tokens, positions, visible_until, keep=True)
    return states, Cache(tuple(keys), tuple(values), positions)


def layer_outputs(
    config: DecoderConfig, params: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
) -> Iterator[tuple[str, jax.Array]]:
    """Yield (name, output [rows, time, hidden]) of every part of the model, to find where a fault begins."""
    outputs: list[jax.Array] = []
    weights = prepare(config, params)
    outputs.append(_prefill_prepared(config, weights, tokens, positions, visible_until, outputs)[0])
    layers = [f"layer {i} (of 0 to {config.num_layers - 1})" for i in range(config.num_layers)]
    return zip(["its embedding", *layers, "its last norm"], outputs, strict=True)


def _prefill_prepared(
    config: DecoderConfig,
    weights: Params,
    tokens: jax.Array,
    positions: jax.Array,
    visible_until: jax.Array,
    outputs: list[jax.Array] | None = None,
) -> tuple[jax.Array, Cache]:
    """Do what `prefill` does; `outputs` gets those of the embedding and of every layer."""
    outputs = [] if outputs is None else outputs
    _check_length(config, tokens.shape[1])
    embed, norm, layers = _modules(config, weights)
    ropes = [shared_rotation(rope, config.head_dim, positions) for rope in config.ropes]
    x, keys, values = embed(tokens, compute_dtype(config)), [], []
    outputs.append(x)
    for layer, window, rope in layers:
        q, k, v = layer.project(x, ropes[rope])
        limit = None if window is None else jnp.int32(window)
        over = config.attention or attend
        mixed = over(q, k, v, positions, visible_until, window=limit, softcap=config.attention_softcap)
        x = layer.finish(x, mixed)
        outputs.append(x)
        keys.append(k.swapaxes(2, 3))
        values.append(v)
    return norm(x), Cache(tuple(keys), tuple(values), positions)


def _modules(
    config: DecoderConfig, weights: Params
) -> tuple[Any, Any, Iterator[tuple[Any, int | None, int]]]:
    """Return the embedding, the last norm, and each layer with its window and the index of its rotary embedding.

    weights: from `prepare`.
    """
    embed, block, norm = _parts(config, "qkv_proj" in weights["layers"][0]["self_attn"])
    ropes = config.layer_ropes or (0,) * config.num_layers
    layers = (nnx.merge(block, parameters) for parameters in weights["layers"])
    return (
        nnx.merge(embed, weights["embed_tokens"]),
        nnx.merge(norm, weights["norm"]),
        zip(layers, config.windows, ropes, strict=True),
    )


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
    join = _joins() and not config.fused

    def one(i: int) -> Params:
        cast = jax.tree.map(lambda x: x.astype(compute_dtype(config)), _merged(config, params, i))
        return _joined(cast) if join else cast

    return {**params, "layers": tuple(map(one, range(config.num_layers)))}


def _merged(config: DecoderConfig, params: Params, i: int) -> Params:
    """Return the parameters of layer `i`, its adapters merged."""
    layer = jax.tree.map(lambda x: x[i], params["layers"])
    return layer if config.lora is None else merge(layer, config.lora.scale)


def _joins() -> bool:
    """Whether `prepare` joins projections: on several devices, their shards would not lie side by side."""
    return device_count() == 1


JOINED = (
    ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
)
"""(module, the fused projection, the separate projections in its order)."""


def _joined(layer: Params) -> Params:
    """Join the parameters of a layer's separate projections into those of a fused layer."""
    layer = {**layer}
    for module, together, parts in JOINED:
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
    """Decode one token per row, written at cache index `slot`, int32 scalar or [B]: (hidden [B, hidden], cache).

    params: from `prepare`, or plain ones. tokens, positions: int32 [B]. visible: bool [B, cache_length], the slots that
    a row's token sees, its own included.
    """
    cache = _noted(cache, positions, slot)

    def mix(q: jax.Array, i: int, keys: jax.Array, values: jax.Array, window: int | None) -> jax.Array:
        seen = visible & (positions[:, None] - cache.positions < window) if window else visible
        return attend_cached(q, keys, values, seen, config.attention_softcap)

    return _decode(config, params, cache, tokens, positions, slot, mix)


def decode_groups(
    config: DecoderConfig,
    params: Params,
    prompts: Cache,
    used: jax.Array,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    step: jax.Array | int,
) -> tuple[jax.Array, Cache]:
    """Decode one token per row, P · G rows in groups of G that share their prompt's cache: (hidden [B, hidden], cache).

    prompts: from `prefill`; used: bool [P, time], its tokens that are not padding. cache: the rows' own tokens, of
    which entry s is written at step s. The rest as in `decode`.
    """
    entries = jnp.arange(cache.positions.shape[1])
    _check_length(config, used.shape[1] + len(entries))
    own, read = entries <= step, used[:, None]
    age = positions.reshape(len(used), -1, 1) - prompts.positions[:, None]  # [P, G, time]

    def mix(q: jax.Array, i: int, keys: jax.Array, values: jax.Array, window: int | None) -> jax.Array:
        near, recent = (read & (age < window), own & (step - entries < window)) if window else (read, own)
        before = (prompts.keys[i], prompts.values[i], near)
        return attend_groups(q, before, (keys, values, recent), config.attention_softcap)

    return _decode(config, params, _noted(cache, positions, step), tokens, positions, step, mix)


def _noted(cache: Cache, positions: jax.Array, slot: jax.Array | int) -> Cache:
    """Write the positions, int32 [B], of the tokens in `slot`."""
    return cache._replace(positions=_placed(cache.positions, positions[:, None], slot, 1))


def _placed(x: jax.Array, new: jax.Array, slot: jax.Array | int, axis: int) -> jax.Array:
    """Write `new`, [B, …], into the cache `x` from index `slot` of `axis` on: one for all rows, or one for each."""
    if jnp.ndim(slot) == 0:
        start: list[jax.Array | int] = [0] * x.ndim
        start[axis] = slot
        return lax.dynamic_update_slice(x, new, start)
    over_rows: Any = jax.vmap(lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, axis - 1))
    placed: jax.Array = over_rows(x, new, slot)
    return placed


def _decode(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    slot: jax.Array | int,
    mix: Callable[[jax.Array, int, jax.Array, jax.Array, int | None], jax.Array],
) -> tuple[jax.Array, Cache]:
    """Do what `decode` does, for a cache that has the tokens' positions.

    mix: (scaled queries [B, K, G, h], layer, its keys and values, window or None) → attention's output [B, K·G·h].
    """
    weights = params if isinstance(params["layers"], tuple) else prepare(config, params)
    embed, norm, layers = _modules(config, weights)
    ropes = [rotation(rope, config.head_dim, positions[:, None]) for rope in config.ropes]
    x = embed(tokens[:, None], compute_dtype(config))
    keys, values = [], []
    for i, (layer, window, rope) in enumerate(layers):
        q, k, v = layer.project(x, ropes[rope])
        keys.append(_placed(cache.keys[i], k.swapaxes(2, 3), slot, 3))
        values.append(_placed(cache.values[i], v, slot, 2))
        x = layer.finish(x, mix(q[:, :, :, 0], i, keys[-1], values[-1], window)[:, None])
    return norm(x)[:, 0], Cache(tuple(keys), tuple(values), cache.positions)


def extend(
    config: DecoderConfig, params: Params, cache: Cache, tokens: jax.Array, start: jax.Array
) -> tuple[jax.Array, Cache]:
    """Compute tokens, int32 [B, T], at positions `start` … `start` + T - 1, start int32 [B], and write them to the
    cache's entries of the same numbers, which are there: (hidden states [B, T, hidden], cache).

    params: from `prepare`, or plain ones. A token sees the cache's entries up to its own.
    """
    weights = params if isinstance(params["layers"], tuple) else prepare(config, params)
    _check_length(config, cache.positions.shape[1])
    embed, norm, layers = _modules(config, weights)
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    ropes = [rotation(rope, config.head_dim, positions) for rope in config.ropes]
    x, keys, values = embed(tokens, compute_dtype(config)), [], []
    for i, (layer, window, rope) in enumerate(layers):
        q, k, v = layer.project(x, ropes[rope])
        keys.append(_placed(cache.keys[i], k.swapaxes(2, 3), start, 3))
        values.append(_placed(cache.values[i], v, start, 2))
        mixed = attend_continued(
            q, keys[-1], values[-1], positions, window=window, softcap=config.attention_softcap
        )
        x = layer.finish(x, mixed)
    return norm(x), Cache(tuple(keys), tuple(values), _placed(cache.positions, positions, start, 1))


def _tensor_divides(config: DecoderConfig) -> int:
    # A norm over all heads would need the sum of squares of every device.
    return 1 if config.qk_norm == "projection" else math.gcd(config.num_kv_heads, config.intermediate_size)


def _prepare_shards(config: DecoderConfig, params: Params) -> Params:
    """Lay the parameters out as `prepare` does, but with separate projections, whose columns belong to heads in order,
    and in the compute dtype throughout, except for norms.
    """

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(compute_dtype(config)) if x.ndim > 1 else x, tree)

    layers = (_merged(config, params, i) for i in range(config.num_layers))
    separate = (_separated(config, layer) if config.fused else layer for layer in layers)
    return {**cast(params), "layers": tuple(map(cast, separate))}


def _separated(config: DecoderConfig, layer: Params) -> Params:
    """Split the parameters of fused projections into those of separate ones."""
    layer, keys = {**layer}, config.num_kv_heads * config.head_dim
    queries, inner = config.num_heads * config.head_dim, config.intermediate_size
    widths: dict[str, tuple[int, ...]] = {"self_attn": (queries, keys, keys), "mlp": (inner, inner)}
    for module, together, parts in JOINED:
        inside = layer[module]
        if together not in inside:  # experts have separate ones
            continue
        ends = list(itertools.accumulate(widths[module]))[:-1]
        pieces = {k: jnp.split(x, ends, axis=-1) for k, x in inside[together].items()}
        layer[module] = {k: v for k, v in inside.items() if k != together} | {
            part: {k: x[i] for k, x in pieces.items()} for i, part in enumerate(parts)
        }
    return layer


def _shard_axes(config: DecoderConfig) -> Params:
    """Return the logical axes of what `_prepare_shards` returns; every device has the whole embedding table."""
    names = axes(replace(config, lora=None, fused=False))
    layer = jax.tree.map(lambda x: x[1:], names["layers"], is_leaf=lambda x: isinstance(x, tuple))
    table = {"embedding": (None, None)}
    return {**names, "embed_tokens": table, "layers": (layer,) * config.num_layers}


TENSOR_PARALLEL = TensorParallel(_tensor_divides, _prepare_shards, _shard_axes)
