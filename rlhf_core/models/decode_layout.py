"""How a decoder's parameters are laid out for decoding: a dict per layer, whole on a device or shared by several."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core.contracts import TensorParallel
from rlhf_core.models.layer import Recurrent, layer_of
from rlhf_core.models.lora import ROUTER, Lora, merge
from rlhf_core.models.quantized import BLOCK, GROUP, plain, with_plain_scales
from rlhf_core.runtime.machine import device_count

if TYPE_CHECKING:
    from rlhf_core.models.config import DecoderConfig
    from rlhf_core.models.decoder import Decoder, Params

EXACT = (ROUTER, GROUP)
"""Parameters, or modules, that keep their dtype, beside those that a mixer with a state names."""
JOINED = (
    ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
)
"""(module, the fused projection, the separate projections in its order)."""


def stack_of(layers: Any, kind: str) -> Any:
    """Return the layers of a kind: of modules or of parameters, where all layers of the model may be of one kind."""
    if not kind:
        return layers
    return layers[kind] if isinstance(layers, dict) else getattr(layers, kind)


def prepare(decoder: Decoder, params: Params) -> Params:
    """Lay the parameters out as `decode` reads them fastest: a dict per layer, in the compute dtype, adapters merged,
    projections of the same input joined.

    Slicing stacked parameters inside a loop copies every weight for every token; XLA does not hoist that.
    """
    # On several devices, the shards of joined projections would not lie next to each other.
    join = device_count() == 1 and not decoder.config.fused and decoder.quantized is None
    cast = functools.partial(jax.tree.map_with_path, functools.partial(_cast, decoder))

    def one(i: int) -> Params:
        layer: Params = cast(_merged(decoder, params, i))
        return _joined(layer) if join else layer

    around = {"per_layer_inputs"} & set(params)  # a large table, of which rows are read
    layers = tuple(map(one, range(decoder.config.num_layers)))
    return {**params, **{name: cast(params[name]) for name in around}, "layers": layers}


def _cast(decoder: Decoder, path: Any, x: jax.Array) -> jax.Array:
    exact = {*EXACT, *(name for mixer in _recurrent(decoder) for name in mixer.exact)}
    return x if any(part.key in exact for part in path) else x.astype(decoder.compute_dtype)


def _recurrent(decoder: Decoder) -> list[type[Recurrent]]:
    """List the mixers that have a state."""
    mixers = [layer_of(stack.config).mixer for stack in decoder.config.stacks.values()]
    return [mixer for mixer in mixers if issubclass(mixer, Recurrent)]


def _merged(decoder: Decoder, params: Params, i: int) -> Params:
    """Return the parameters of layer `i`, its adapters merged unless the base is quantized."""
    kind, n = decoder.config.at(i)
    layer: Params = jax.tree.map(lambda x: x[n], stack_of(params["layers"], kind))
    if decoder.quantized is not None:
        return with_plain_scales(_without_keys(layer))
    return layer if decoder.lora is None else merge(layer, decoder.lora.scale)


def unmerged(decoder: Decoder) -> Lora | None:
    """Return the adapters that `prepare` does not merge, without dropout."""
    return replace(decoder.lora, dropout=0.0) if decoder.lora and decoder.quantized else None


def tensor_parallel(decoder: Decoder) -> TensorParallel:
    """Return how devices share the layers while they sample."""
    configs = [stack.config for stack in decoder.config.stacks.values()]
    experts = [config.experts for config in configs]
    # A norm over all heads would need the sum of squares of every device.
    whole = decoder.config.qk_norm == "projection"
    # Models with a state and experts have few heads for their many experts.
    if decoder.has_states and (any(experts) or decoder.quantized is not None):
        whole = True
    if whole:
        # Experts are shared in any case, by their number: a device computes the tokens that are sent to its own.
        divides = math.gcd(*experts) or 1
    else:
        divides = math.gcd(*(number for config in configs for number in _divisible(decoder, config)))
    prepare = functools.partial(_prepare_shards, decoder, not whole)
    return TensorParallel(divides, prepare, _shard_axes(decoder, whole), not whole)


def _divisible(decoder: Decoder, config: DecoderConfig) -> list[int]:
    """List the sizes of a layer that the number of devices sharing its heads must divide."""
    heads = layer_of(config).mixer.heads(config)
    numbers = [heads, config.experts or config.intermediate_size, config.shared_size]
    if decoder.quantized in (None, "int8"):
        return numbers
    # A matrix that is cut along its inputs keeps its blocks whole.
    inputs = [config.num_heads * config.head_dim, config.shared_size]
    if not config.experts:
        inputs.append(config.intermediate_size)
    return numbers + [size // BLOCK for size in inputs if size % BLOCK == 0]


def _prepare_shards(decoder: Decoder, shares_heads: bool, params: Params) -> Params:
    """Lay the parameters out as `prepare` does, but with separate projections, whose columns belong to heads in order,
    and in the compute dtype throughout, except for norms and routers.
    """
    c = decoder.config

    def cast(tree: Any) -> Any:
        return jax.tree.map_with_path(lambda path, x: _cast(decoder, path, x) if x.ndim > 1 else x, tree)

    def one(i: int) -> Params:
        layer = _merged(decoder, params, i)
        layer = _separated(decoder, layer) if c.fused else layer
        return cast(_apart(layer, c.stacks[c.at(i)[0]].config) if shares_heads else layer)

    return {**cast(params), "layers": tuple(map(one, range(c.num_layers)))}


def _apart(layer: Params, config: DecoderConfig) -> Params:
    """Keep the parts of the parameters of a mixer with a state apart."""
    kind = layer_of(config)
    if not issubclass(kind.mixer, Recurrent):
        return layer
    return {**layer, kind.name: kind.mixer.apart(layer[kind.name], config)}


def _separated(decoder: Decoder, layer: Params) -> Params:
    """Split the parameters of fused projections into separate ones."""
    c, layer = decoder.config, {**layer}
    queries = c.num_heads * c.head_dim
    keys = c.num_kv_heads * c.head_dim
    inner = c.intermediate_size
    widths: dict[str, tuple[int, ...]] = {"self_attn": (queries, keys, keys), "mlp": (inner, inner)}
    for module, together, parts in JOINED:
        inside = layer.get(module, {})
        if together not in inside:  # experts have separate ones
            continue
        ends = list(itertools.accumulate(widths[module]))[:-1]

        def piece(i: int, path: Any, x: jax.Array) -> jax.Array:
            return x if path[-1].key == "lora_a" else jnp.split(x, ends, axis=-1)[i]  # noqa: B023

        layer[module] = {k: v for k, v in inside.items() if k != together} | {
            part: jax.tree.map_with_path(functools.partial(piece, i), inside[together])
            for i, part in enumerate(parts)
        }
    return layer


def _shard_axes(decoder: Decoder, whole_layers: bool) -> Params:
    """Return the logical axes of what `_prepare_shards` returns; every device has the whole embedding table.

    whole_layers: whether every device has the whole layers, their experts excepted.
    """
    c = decoder.config
    lora = unmerged(decoder)
    lora = lora and replace(lora, targets=separate(lora.targets))
    laid_out = replace(c, fused=False, apart=not whole_layers)
    names = replace(decoder, lora=lora, quantized=plain(decoder.quantized), config=laid_out).logical_axes()

    def shared(path: Any, names: tuple[str | None, ...]) -> tuple[str | None, ...]:
        if any(part.key == "experts" for part in path):
            return ("peers", *[None] * (len(names) - 2))
        return (None,) * (len(names) - 1) if whole_layers else names[1:]

    layers = jax.tree.map_with_path(shared, names["layers"], is_leaf=lambda x: isinstance(x, tuple))
    each = (stack_of(layers, c.at(i)[0]) for i in range(c.num_layers))
    around = {name: axes for name, axes in names.items() if name in ("embed_tokens", "per_layer_inputs")}

    def whole_tables(path: Any, names: tuple[str | None, ...]) -> tuple[str | None, ...]:
        return (None,) * len(names) if path[-1].key == "embedding" else names

    tables = jax.tree.map_with_path(whole_tables, around, is_leaf=lambda x: isinstance(x, tuple))
    return {**names, **tables, "layers": tuple(each)}


def _without_keys(layer: Params) -> Params:
    """Drop the random state of adapters' dropout."""
    inner = {name: _without_keys(x) if isinstance(x, dict) else x for name, x in layer.items()}
    return {name: x for name, x in inner.items() if name != "lora_key"}


def separate(targets: Sequence[str]) -> tuple[str, ...]:
    """Replace fused projections among the targets of adapters by the separate ones."""
    parts = {f"{module}.{together}": (module, names) for module, together, names in JOINED}
    found = []
    for target in targets:
        end = next((name for name in parts if target.endswith(name)), None)
        module, names = parts[end] if end else ("", ())
        found += [f"{target.removesuffix(end)}{module}.{name}" for name in names] if end else [target]
    return tuple(found)


def _joined(layer: Params) -> Params:
    """Join the parameters of a layer's separate projections into fused ones."""
    layer = {**layer}
    for module, together, parts in JOINED:
        inside = layer.get(module, {})
        each = [inside[part] for part in parts if part in inside]
        if len(each) > 1:  # absent in experts
            whole = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), *each)
            layer[module] = {k: v for k, v in inside.items() if k not in parts} | {together: whole}
    shared = layer.get("mlp", {}).get("shared_expert")
    if shared:
        layer["mlp"] = {**layer["mlp"], "shared_expert": _joined({"mlp": shared})["mlp"]}
    return layer


def is_joined(layer: Params) -> bool:
    """Tell whether `prepare` has joined projections of a layer."""
    mlp = layer.get("mlp", {})
    inside = (layer.get("self_attn", {}), mlp, mlp.get("shared_expert", {}))
    return any(together in each for each in inside for _, together, _ in JOINED)
