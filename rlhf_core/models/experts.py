"""Mixtures of experts: the router, and gated MLPs of which each token passes through a few."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from rlhf_core.contracts import EXPERTS
from rlhf_core.mesh import gathered, mesh_of_rows, param_spec, row_axes, row_parts, sum_over_tensor
from rlhf_core.models.config import DecoderConfig
from rlhf_core.models.experts_exchange import Exchange, by_expert, exchanged, room, taken
from rlhf_core.models.kernels import find_kernels
from rlhf_core.models.layers import ACTIVATIONS, MLP, Linear
from rlhf_core.models.quantized import PlainScaled, only_now, scales_of
from rlhf_core.runtime.machine import platform


def expert_product(
    x: jax.Array, kernel: jax.Array | PlainScaled, counts: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Compute `product` for the rows of every expert.

    x: [N, in], sorted by expert. kernel: [experts, in, out]. counts: int32 [experts], rows per expert. weights: the
    kernel in the dtype of `x`, where it is at hand; the kernel then only gets the gradient.
    """
    if isinstance(kernel, PlainScaled):
        return _packed_expert_product(x, kernel, counts)
    if weights is None and x.dtype == kernel.dtype and platform() != "gpu":
        return lax.ragged_dot(x, kernel, counts)
    weights = kernel.astype(x.dtype) if weights is None else weights
    return _rounded_expert_product(x, kernel, weights, counts)


@jax.custom_vjp
def _rounded_expert_product(
    x: jax.Array, kernel: jax.Array, weights: jax.Array, counts: jax.Array
) -> jax.Array:
    return _rows_product(x, weights, counts)


def _expert_forward(x: jax.Array, kernel: jax.Array, weights: jax.Array, counts: jax.Array) -> Any:
    return _rows_product(x, weights, counts), (x, weights, counts)


def _expert_backward(residuals: tuple[jax.Array, ...], d_y: jax.Array) -> Any:
    x, weights, counts = residuals
    d_kernel = _kernel_gradient(x, d_y, counts)
    return _rows_product(d_y, weights, counts, transposed=True), d_kernel, None, None


@jax.custom_vjp
def _packed_expert_product(x: jax.Array, kernel: PlainScaled, counts: jax.Array) -> jax.Array:
    """Dequantize in the forward and in the backward pass, see `quantized.quantized_product`."""
    kernel, x = only_now(kernel, x)
    return _rows_product(x, kernel.matrices(x.dtype), counts)


def _packed_forward(x: jax.Array, kernel: PlainScaled, counts: jax.Array) -> Any:
    return _packed_expert_product(x, kernel, counts), (kernel, counts)


def _packed_backward(residuals: Any, d_y: jax.Array) -> Any:
    (kernel, counts), d_y = only_now(residuals, d_y)
    return _rows_product(d_y, kernel.matrices(d_y.dtype), counts, transposed=True), None, None


_packed_expert_product.defvjp(_packed_forward, _packed_backward)


def _kernel_gradient(x: jax.Array, d_y: jax.Array, counts: jax.Array) -> jax.Array:
    """Compute x[rows of e]ᵀ · d_y[rows of e], float32 [experts, in, out]; XLA multiplies all rows for every expert."""
    kernels = find_kernels(EXPERTS)
    if kernels is not None:
        return kernels.gradient(x, d_y, counts)
    rows = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    return lax.ragged_dot_general(x, d_y, counts, rows, preferred_element_type=jnp.float32)


def _rows_product(
    x: jax.Array, weights: jax.Array, counts: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Multiply the rows of every expert by its weights, [experts, in, out], or by their transposes."""
    kernels = find_kernels(EXPERTS)
    if kernels is not None:
        return kernels.rows(x, weights, counts, transposed=transposed)
    return lax.ragged_dot(x, weights.swapaxes(1, 2) if transposed else weights, counts)


_rounded_expert_product.defvjp(_expert_forward, _expert_backward)


@jax.custom_vjp
def _add_bias(y: jax.Array, bias: jax.Array, own: jax.Array) -> jax.Array:
    """Add each expert's bias to its rows.

    y: [N, out]. bias: float32 [experts, out], which gets a float32 gradient. own: bool [N, experts], whose row it is. A
    product, since the TPU compiler takes long for the sums of a gather's gradient.
    """
    return y + jnp.matmul(own.astype(y.dtype), bias.astype(y.dtype), precision=lax.Precision.HIGHEST)


def _bias_forward(y: jax.Array, bias: jax.Array, own: jax.Array) -> Any:
    return _add_bias(y, bias, own), own


def _bias_backward(own: jax.Array, d_y: jax.Array) -> Any:
    rows = (((0,), (0,)), ((), ()))
    d_bias = lax.dot_general(
        own.astype(d_y.dtype), d_y, rows, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return d_y, d_bias, None


_add_bias.defvjp(_bias_forward, _bias_backward)


def expert_count(definition: Any) -> int:
    """Return the experts of a model's layers; 0 for a model without."""
    config = getattr(definition, "config", None)
    stacks = config.stacks.values() if isinstance(config, DecoderConfig) else ()
    return max((stack.config.experts for stack in stacks), default=0)


class Load(NamedTuple):
    """What a router did with the tokens that count, float32 [experts], or [layers, experts] of several layers."""

    pairs: jax.Array
    """Tokens sent to each expert; a token counts once for each of its experts."""
    probability: jax.Array
    """The sum of the router's probabilities over the tokens."""
    replayed: jax.Array
    """float32 [2], or [layers, 2]: tokens whose experts were given, and those that the router sends elsewhere."""


class Routed(NamedTuple):
    """What the router of one layer did with its tokens."""

    chosen: jax.Array
    """int32 [B · T, k], the experts of each token."""
    load: Load | None
    """Of the tokens that count; None where it is not asked for."""


class Routing(NamedTuple):
    """What one layer's choice of experts is told, the routes to replay, and asked, its load.

    counted: bool [B, T], the tokens whose load is wanted; None: no load is. routes: int8 or int16 [B, T, k], the
    experts of tokens, -1 where the router chooses; None: it chooses all.
    """

    counted: jax.Array | None
    routes: jax.Array | None

    def follow(self, config: DecoderConfig, logits: jax.Array, own: jax.Array) -> Routed:
        """Choose each token's experts. own: int32 [B · T, k], the router's; logits: float32 [B · T, experts]."""
        chosen = own
        if self.routes is not None:
            routes = self.routes.reshape(own.shape).astype(jnp.int32)
            chosen = jnp.where(routes < 0, own, routes)
        if self.counted is None:
            return Routed(chosen, None)
        counted = self.counted.reshape(-1).astype(jnp.float32)
        pairs = jnp.zeros(config.experts).at[chosen].add(counted[:, None])
        if config.router == "sigmoid":
            probability = jax.nn.sigmoid(logits)
            probability = probability / probability.sum(-1, keepdims=True)
        else:
            probability = jax.nn.softmax(logits, axis=-1)
        replayed = jnp.zeros(2)
        if self.routes is not None:
            given = counted * (routes[:, 0] >= 0)
            same = (own[:, :, None] == chosen[:, None]).any(2).all(1)
            replayed = jnp.stack([given.sum(), (given * ~same).sum()])
        return Routed(chosen, Load(pairs, (counted[:, None] * probability).sum(0), replayed))


@dataclass
class Recorder:
    """Collects what the routers of some models do, see `recording`."""

    definitions: Collection[Any]
    counted: jax.Array | None
    routes: jax.Array | None
    found: list[tuple[Any, Load]] = field(default_factory=list)
    """(definition, load [layers, experts]) of each pass."""
    chosen: list[jax.Array] = field(default_factory=list)
    """int32 [B, k] of each layer of a decoded token."""

    def routes_of(self, definition: Any, layers: Sequence[int]) -> jax.Array | None:
        """Return the routes of some layers, [layers, B, T, k]; None where they have no experts, or none are given."""
        every = expert_layers(definition.config)
        if self.routes is None or layers[0] not in every:
            return None
        whole = self.routes.reshape(*self.routes.shape[:2], len(every), -1)
        return jnp.moveaxis(whole[:, :, jnp.asarray([every.index(i) for i in layers])], 2, 0)

    def add(self, definition: Any, loads: Sequence[Load | None]) -> None:
        """Add a pass. loads: by layer, None where a layer has no experts."""
        there = [load for load in loads if load is not None]
        if there:
            self.found.append((definition, jax.tree.map(lambda *each: jnp.stack(each), *there)))


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(
    definitions: Collection[Any], counted: jax.Array | None = None, routes: Any | None = None
) -> Iterator[Recorder]:
    """Record what the routers do in each pass that one of the definitions makes within, and replay routes.

    counted: bool [rows, time], the tokens of the rows whose load is collected; None: no loads. routes: int [rows, time,
    layers · k], as in `rlhf_core.packing.Packed`. The passes must be traced where the results are used.
    """
    recorder = Recorder(definitions, counted, None if routes is None else jnp.asarray(routes))
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def recorder_of(definition: Any) -> Recorder | None:
    """Return the recorder that wants this definition's routers, if there is one."""
    recorder = _recorder.get()
    return recorder if recorder is not None and definition in recorder.definitions else None


def expert_layers(config: DecoderConfig) -> list[int]:
    """List the layers that have experts."""
    stacks = [stack for stack in config.stacks.values() if stack.config.experts]
    return sorted(layer for stack in stacks for layer in stack.layers)


def move_biases(definition: Any, params: Any, load: jax.Array, rate: float) -> dict[str, Any]:
    """Add rate · sign(mean load of the layer - load) to the corrections of routers (Wang et al. 2024).

    load: float32 [layers with experts, experts], tokens sent to each expert in an update.
    """
    every = expert_layers(definition.config)
    stacks = definition.config.stacks
    layers = {**params["layers"]}
    for kind, stack in stacks.items():
        inside = {**(layers.get(kind, {}) if kind else layers)}
        gate = {**inside.get("mlp", {}).get("gate", {})}
        if not stack.config.experts or CORRECTION not in gate:  # frozen
            continue
        own = load[jnp.asarray([every.index(i) for i in stack.layers])]
        gate[CORRECTION] = gate[CORRECTION] + rate * jnp.sign(
            own.sum(-1, keepdims=True) - own * own.shape[-1]
        )
        inside["mlp"] = {**inside["mlp"], "gate": gate}
        layers = {**layers, kind: inside} if kind else inside
    return {**params, "layers": layers}


CORRECTION = "e_score_correction_bias"


def has_corrections(definition: Any) -> bool:
    """Tell whether the routers of a model with experts choose by a correction, too."""
    return any(stack.config.router == "sigmoid" for stack in definition.config.stacks.values())


def route_shape(definition: Any) -> jax.ShapeDtypeStruct | None:
    """Return shape and dtype of a token's routes, [layers, k]; None for a model without experts."""
    count = expert_count(definition)
    if not count:
        return None
    config = definition.config
    dtype = jnp.int8 if count <= 128 else jnp.int16
    return jax.ShapeDtypeStruct((len(expert_layers(config)), config.experts_per_token), dtype)


class ExpertMLPs(nnx.Module):
    """Gated MLPs, their kernels float32 [layers, experts, in, out]."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        bias = c.swiglu is not None
        make = functools.partial(Linear, rngs, (c.num_layers, c.experts), std=c.initializer_range, bias=bias)
        inside = ("layers", "experts", "embed", "mlp")
        if c.swiglu:
            self.gate_up_proj = make((c.hidden_size, 2 * c.intermediate_size), axes=inside)
        else:
            self.gate_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
            self.up_proj = make((c.hidden_size, c.intermediate_size), axes=inside)
        self.down_proj = make(
            (c.intermediate_size, c.hidden_size), axes=("layers", "experts", "mlp", "embed")
        )
        self.config = c

    def __call__(self, x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
        """Sum the outputs of each token's experts by weight. x: [B, T, D]; weight: float32, chosen: int32 [B, T, k].

        On a mesh every device sorts the pairs of its own rows and experts, see `Exchange`.
        """
        names = ("gate_up_proj", "down_proj") if self.config.swiglu else ("gate_proj", "up_proj", "down_proj")
        both = {name: _parts_of(getattr(self, name)) for name in names}
        arrays, axes = ({name: each[i] for name, each in both.items()} for i in (0, 1))
        mesh = mesh_of_rows(x)
        if row_parts() > 1:  # what is sent depends on the rows of a device
            raise NotImplementedError("the exchange of tokens among experts is not mapped over parts")
        mix = functools.partial(_mixed, self.config)
        if mesh is None:
            return mix(None, x, weight, chosen, arrays)
        specs = jax.tree.map(lambda a, named: param_spec(mesh, named, a.shape), arrays, axes)
        rows = PartitionSpec(row_axes())
        over = jax.shard_map(
            functools.partial(mix, specs),
            mesh=mesh,
            in_specs=(rows, rows, rows, specs),
            out_specs=rows,
            check_vma=False,
        )
        mixed: jax.Array = over(x, weight, chosen, arrays)
        return mixed


def _parts_of(linear: Linear) -> tuple[list[Any], list[Any]]:
    """Return one layer's kernels, an array or `PlainScaled`, and biases, if any; and the logical axes of each array."""
    params = [p for p in (linear.kernel, linear.bias) if p is not None]
    arrays: list[Any] = [p[...] for p in params]
    axes: list[Any] = [p.get_metadata("axes")[1:] for p in params]
    packed = linear.quantized
    if packed is not None:
        arrays.insert(0, PlainScaled(packed.arrays["codes"], scales_of(packed.arrays)))
        axes.insert(0, PlainScaled(*[packed.codes.get_metadata("axes")[1:]] * 2))
    return arrays, axes


def _mixed(
    config: DecoderConfig, specs: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array, arrays: Any
) -> jax.Array:
    """Do what `ExpertMLPs` does, for the rows and with the experts of one device. specs: of the arrays on the mesh."""
    tokens = x.reshape(-1, x.shape[-1])
    pairs = chosen.reshape(-1)
    k, down = chosen.shape[-1], arrays["down_proj"][0]
    kernels, weights, biases = _at_hand(x.dtype, specs, arrays)
    mlp = functools.partial(_mlp, config)
    own = down.shape[0]
    peers = specs is None and own < config.experts
    if peers:  # in a sampler, devices that share layers have the same tokens, and each its own experts
        pairs = pairs - lax.axis_index("tensor") * own
        pairs = jnp.where((pairs >= 0) & (pairs < own), pairs, own)
    order, place, counts = by_expert(pairs, own + 1 if peers else config.experts)
    if peers or own == config.experts:  # pair n belongs to token n // k
        used = (jnp.arange(len(pairs)) < counts[:own].sum())[:, None] if peers else None
        made = mlp(taken(tokens, order, place, k), counts[:own], used, kernels, biases, weights)
    else:
        devices = config.experts // own
        exchange = Exchange(mlp, devices, own, k, room(len(pairs), devices))
        made = exchanged(exchange, tokens, (order, place, pairs[order]), kernels, biases, weights)
    apart = taken(made, place, order, 1).reshape(len(tokens), k, -1)
    mixed = jnp.einsum("nkd,nk->nd", apart, weight.reshape(-1, k).astype(x.dtype))
    mixed = sum_over_tensor(mixed) if peers or down.shape[1] < config.intermediate_size else mixed
    return mixed.reshape(x.shape)


def _at_hand(dtype: Any, specs: Any, arrays: Any) -> tuple[Any, Any, Any]:
    """Gather what `fsdp` spreads: kernels, which get float32 gradients; the same in `dtype`; and biases, float32."""
    kernels: dict[str, Any] = {}
    weights, biases = {}, {}
    for name, (kernel, *bias) in arrays.items():
        spec = specs[name] if specs else [PartitionSpec()] * 2
        if isinstance(kernel, PlainScaled):
            kernels[name] = PlainScaled(*map(_gathered_by, kernel, spec[0])) if specs else kernel
        else:
            kernels[name] = _gathered_by(kernel, spec[0])
            if kernel.dtype != dtype:  # the other kernel is not gathered: only its gradient is computed
                weights[name] = lax.stop_gradient(_gathered_by(kernel.astype(dtype), spec[0]))
        if bias:
            biases[name] = _gathered_by(bias[0], spec[1])
    return kernels, weights, biases


def _gathered_by(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Gather all dimensions of a device's part but the experts and those of `tensor`."""
    for dimension, axes in enumerate(spec):
        if dimension and axes not in (None, "tensor"):
            x = lax.all_gather(x, axes, axis=dimension, tiled=True)
    return x


def every_other(x: jax.Array, on: str) -> tuple[jax.Array, jax.Array]:
    """Split the columns of x, [N, 2n], into the even and the odd ones, [N, n] each, on a platform.

    The gradient of a slice with steps takes the TPU compiler minutes and gigabytes: there, columns are chosen by
    products with ones.
    """
    if on != "tpu":
        return x[:, 0::2], x[:, 1::2]
    size = math.gcd(x.shape[1], 128)
    parts = x.reshape(len(x), -1, size)
    ones = jnp.eye(size, dtype=x.dtype)
    even, odd = (jnp.matmul(parts, ones[:, i::2], precision=lax.Precision.HIGHEST) for i in (0, 1))
    return even.reshape(len(x), -1), odd.reshape(len(x), -1)


def _mlp(
    config: DecoderConfig,
    x: jax.Array,
    counts: jax.Array,
    used: jax.Array | None,
    kernels: Any,
    biases: Any,
    weights: Any,
) -> jax.Array:
    """Apply each expert to its rows.

    x: [N, D], sorted by expert; counts: int32 [experts], rows per expert. used: bool [N, 1], False for the rows after
    those of the last expert; None: there are none.
    """

    ends = jnp.cumsum(counts)
    rows = jnp.arange(len(x))[:, None]
    own = (rows >= ends - counts) & (rows < ends)

    def linear(name: str, x: jax.Array) -> jax.Array:
        y = expert_product(x, kernels[name], counts, weights.get(name))
        if name in biases:
            bias = biases[name]
            parts = kernels[name].shape[1] < config.intermediate_size
            if name == "down_proj" and parts:  # the devices' products are summed
                bias = jnp.where(lax.axis_index("tensor") == 0, bias, 0)
            y = _add_bias(y, bias, own)
        return y if used is None else jnp.where(used, y, 0)

    if config.swiglu:
        slope, limit = config.swiglu
        gate, up = every_other(linear("gate_up_proj", x), platform())
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(slope * gate)
    else:
        inner = ACTIVATIONS[config.activation](linear("gate_proj", x)) * linear("up_proj", x)
    return linear("down_proj", inner)


class Experts(nnx.Module):
    """The sum of the likeliest experts' outputs, weighted by the router's probabilities. No token is dropped."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        c = config
        linear = functools.partial(Linear, rngs, (c.num_layers,), std=c.initializer_range, bias=False)
        router = functools.partial(linear, bias=True) if c.router == "chosen" else linear
        self.gate = router((c.hidden_size, c.experts), axes=("layers", "embed", None))
        if c.router == "sigmoid":
            zero = jnp.zeros((c.num_layers, c.experts), jnp.float32)
            self.gate.e_score_correction_bias = nnx.Param(zero, axes=("layers", None))
        self.experts = ExpertMLPs(c, rngs)
        if c.shared_size:
            self.shared_expert = MLP(replace(c, intermediate_size=c.shared_size), rngs)
        if c.shared_gate:
            self.shared_expert_gate = linear((c.hidden_size, 1), axes=("layers", "embed", None))
        self.config = c

    def logits(self, tokens: jax.Array) -> jax.Array:
        """Compute the router's logits, float32 [N, experts]. tokens: [N, D].

        Float32 also where layers compute in bfloat16: trainer and sampler would choose different experts more often.
        """
        kernel = gathered(self.gate.kernel[...], ("embed", None))
        logits = jnp.matmul(tokens.astype(jnp.float32), kernel, precision=lax.Precision.HIGHEST)
        return logits if self.gate.bias is None else logits + self.gate.bias[...]

    def choose(self, logits: jax.Array) -> jax.Array:
        """Choose each token's experts, int32 [N, per token], by the logits, float32 [N, experts]."""
        c = self.config
        if c.router != "sigmoid":
            return lax.top_k(logits, c.experts_per_token)[1]
        score = jax.nn.sigmoid(logits)
        groups, allowed = c.expert_groups
        score = lax.stop_gradient(score + self.gate.e_score_correction_bias[...])
        if allowed < groups:
            each = score.reshape(len(score), groups, -1)
            best = lax.top_k(each, min(2, each.shape[-1]))[0].sum(-1)
            among = (lax.top_k(best, allowed)[1][..., None] == jnp.arange(groups)).any(1)
            score = jnp.where(among[..., None], each, -jnp.inf).reshape(score.shape)
        return lax.top_k(score, c.experts_per_token)[1]

    def weigh(self, logits: jax.Array, chosen: jax.Array) -> jax.Array:
        """Compute the weights of the chosen experts, float32 [N, per token]."""
        c = self.config
        if c.router == "chosen":
            return jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=1), axis=-1)
        probability = jax.nn.sigmoid(logits) if c.router == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        weight = jnp.take_along_axis(probability, chosen, axis=1)
        if c.normalise_experts:
            weight = weight / (weight.sum(-1, keepdims=True) + c.normalise_floor)
        return weight if c.expert_scale == 1 else weight * c.expert_scale

    def __call__(
        self, x: jax.Array, routing: Routing | None = None, seen: jax.Array | None = None
    ) -> tuple[jax.Array, Routed | None]:
        """[B, T, D] → the same, and what the router did where it is asked.

        seen: what the router reads, [B, T, D]; None: the same.
        """
        c = self.config
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.logits(tokens if seen is None else seen.reshape(tokens.shape))
        chosen = self.choose(logits)
        routed = None if routing is None else routing.follow(c, logits, chosen)
        if routed is not None:
            chosen = routed.chosen
        weight = self.weigh(logits, chosen)
        k = (*x.shape[:2], -1)
        mixed = self.experts(x, weight.reshape(k), chosen.reshape(k))
        if not c.shared_size:
            return mixed, routed
        shared = self.shared_expert(x)
        if c.shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_expert_gate(x))
        return mixed + shared, routed
