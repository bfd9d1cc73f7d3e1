"""Mixtures of experts: the router, and gated MLPs of which each token passes through a few."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from rlhf_core.mesh import ROW_AXES, gathered, mesh_of_rows, param_spec, row_axes, row_parts, sum_over_tensor
from rlhf_core.models.config import DecoderConfig
from rlhf_core.models.layers import ACTIVATIONS, MLP, Linear
from rlhf_core.models.quantized import Packed, only_now, scales_of
from rlhf_core.runtime.devices import platform


def expert_product(
    x: jax.Array, kernel: jax.Array | Packed, counts: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Compute `product` for the rows of every expert.

    x: [N, in], sorted by expert. kernel: [experts, in, out]. counts: int32 [experts], rows per expert. weights: the
    kernel in the dtype of `x`, where it is at hand; the kernel then only gets the gradient.
    """
    if isinstance(kernel, Packed):
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
    d_kernel = _kernel_gradient(x, d_y, counts, platform())
    return _rows_product(d_y, weights, counts, transposed=True), d_kernel, None, None


@jax.custom_vjp
def _packed_expert_product(x: jax.Array, kernel: Packed, counts: jax.Array) -> jax.Array:
    """Dequantize in the forward and in the backward pass, see `quantized.quantized_product`."""
    kernel, x = only_now(kernel, x)
    return _rows_product(x, kernel.matrices(x.dtype), counts)


def _packed_forward(x: jax.Array, kernel: Packed, counts: jax.Array) -> Any:
    return _packed_expert_product(x, kernel, counts), (kernel, counts)


def _packed_backward(residuals: Any, d_y: jax.Array) -> Any:
    (kernel, counts), d_y = only_now(residuals, d_y)
    return _rows_product(d_y, kernel.matrices(d_y.dtype), counts, transposed=True), None, None


_packed_expert_product.defvjp(_packed_forward, _packed_backward)


def _kernel_gradient(
    x: jax.Array, d_y: jax.Array, counts: jax.Array, on: str, *, interpret: bool = False
) -> jax.Array:
    """Compute x[rows of e]ᵀ · d_y[rows of e], float32 [experts, in, out]; XLA multiplies all rows for every expert."""
    if on == "gpu":
        return _kernels_for_gpus().expert_kernels(x, d_y, counts, interpret=interpret)
    if on == "tpu":
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm  # Pallas takes a second to import

        x, d_y = (jnp.pad(each, ((0, -len(each) % 128), (0, 0))) for each in (x, d_y))
        tiles = (128, min(512, x.shape[1]), min(512, d_y.shape[1]))
        made: jax.Array = tgmm(x.T, d_y, counts, jnp.float32, tiles, interpret=interpret)
        return made
    rows = lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
    return lax.ragged_dot_general(x, d_y, counts, rows, preferred_element_type=jnp.float32)


def _kernels_for_gpus() -> Any:
    from rlhf_core.models import experts_pallas_gpu  # Pallas takes a second to import

    return experts_pallas_gpu


def _rows_product(
    x: jax.Array, weights: jax.Array, counts: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Multiply the rows of every expert by its weights, [experts, in, out], or by their transposes."""
    if platform() == "gpu":
        return _kernels_for_gpus().expert_rows(x, weights, counts, transposed=transposed)
    return lax.ragged_dot(x, weights.swapaxes(1, 2) if transposed else weights, counts)


_rounded_expert_product.defvjp(_expert_forward, _expert_backward)


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


@dataclass
class Watch:
    """Takes what the router of one layer does while it is traced, and gives it the experts to use instead.

    counted: bool [B, T], the tokens that count; None: their load is not wanted. routes: int8 or int16 [B, T, k], the
    experts of tokens, -1 where the router chooses; None: it chooses all.
    """

    counted: jax.Array | None
    routes: jax.Array | None
    chosen: jax.Array | None = None
    """int32 [B · T, k]."""
    load: Load | None = None

    def see(self, config: DecoderConfig, logits: jax.Array, own: jax.Array) -> jax.Array:
        """Return the experts to use, int32 [B · T, k]. own: those of the router; logits: float32 [B · T, experts]."""
        chosen = own
        if self.routes is not None:
            routes = self.routes.reshape(own.shape).astype(jnp.int32)
            chosen = jnp.where(routes < 0, own, routes)
        self.chosen = chosen
        if self.counted is None:
            return chosen
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
        self.load = Load(pairs, (counted[:, None] * probability).sum(0), replayed)
        return chosen


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

    def watch(self, layer: Any, routes: jax.Array | None) -> Watch | None:
        """Watch the router of a layer, if it has one. routes: of the layer's tokens."""
        modules = (layer.mlp, getattr(layer, "moe", None))
        router = next((module for module in modules if isinstance(module, Experts)), None)
        if router is None:
            return None
        router.watch = Watch(self.counted, routes)
        return router.watch

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
    layers · k], as in `Packed`. The passes must be traced where the results are used.
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
    every, stacks = expert_layers(definition.config), definition.config.stacks
    layers = {**params["layers"]}
    for kind, stack in stacks.items():
        inside = {**(layers.get(kind, {}) if kind else layers)}
        gate = {**inside.get("mlp", {}).get("gate", {})}
        if not stack.config.experts or CORRECTION not in gate:  # frozen
            continue
        own = load[jnp.asarray([every.index(i) for i in stack.layers])]
        gate[CORRECTION] = gate[CORRECTION] + rate * jnp.sign(own.mean(-1, keepdims=True) - own)
        inside["mlp"] = {**inside["mlp"], "gate": gate}
        layers = {**layers, kind: inside} if kind else inside
    return {**params, "layers": layers}


CORRECTION = "e_score_correction_bias"


def has_corrections(definition: Any) -> bool:
    """Tell whether the routers of a model with experts choose by a correction, too."""
    return any(stack.config.router == "sigmoid" for stack in definition.config.stacks.values())


def route_shape(definition: Any) -> jax.ShapeDtypeStruct | None:
    """Return shape and dtype of a token's routes, [layers, k]; None for a model without experts."""
    if not (count := expert_count(definition)):
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
    """Return one layer's kernels, an array or `Packed`, and biases, if any; and the logical axes of each array."""
    params = [p for p in (linear.kernel, linear.bias) if p is not None]
    arrays: list[Any] = [p[...] for p in params]
    axes: list[Any] = [p.get_metadata("axes")[1:] for p in params]
    if (packed := linear.quantized) is not None:
        arrays.insert(0, Packed(packed.arrays["codes"], scales_of(packed.arrays)))
        axes.insert(0, Packed(*[packed.codes.get_metadata("axes")[1:]] * 2))
    return arrays, axes


def _mixed(
    config: DecoderConfig, specs: Any, x: jax.Array, weight: jax.Array, chosen: jax.Array, arrays: Any
) -> jax.Array:
    """Do what `ExpertMLPs` does, for the rows and with the experts of one device. specs: of the arrays on the mesh."""
    tokens, pairs = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    k, down = chosen.shape[-1], arrays["down_proj"][0]
    kernels, weights, biases = _at_hand(x.dtype, specs, arrays)
    mlp, own = functools.partial(_mlp, config), down.shape[0]
    peers = specs is None and own < config.experts
    if peers:  # in a sampler, devices that share layers have the same tokens, and each its own experts
        pairs = pairs - lax.axis_index("tensor") * own
        pairs = jnp.where((pairs >= 0) & (pairs < own), pairs, own)
    order = jnp.argsort(pairs, stable=True)  # by expert; pair n belongs to token n // k
    place = jnp.argsort(order)
    if peers or own == config.experts:
        counts = jnp.bincount(pairs, length=own + 1)[:-1]
        used = (jnp.arange(len(pairs)) < counts.sum())[:, None] if peers else None
        made = mlp(tokens[order // k], counts, used, kernels, biases, weights)
    else:
        devices = config.experts // own
        room = 8 * math.ceil(CAPACITY * len(pairs) / (8 * devices))
        exchange = Exchange(mlp, devices, own, k, min(room, len(pairs)))
        made = exchanged(exchange, tokens, (order, place, pairs[order]), kernels, biases, weights)
    apart = made[place].reshape(len(tokens), k, -1)
    mixed = jnp.einsum("nkd,nk->nd", apart, weight.reshape(-1, k).astype(x.dtype))
    mixed = sum_over_tensor(mixed) if peers or down.shape[1] < config.intermediate_size else mixed
    return mixed.reshape(x.shape)


def _at_hand(dtype: Any, specs: Any, arrays: Any) -> tuple[Any, Any, Any]:
    """Gather what `fsdp` spreads: kernels, which get float32 gradients; the same in `dtype`; and biases, float32."""
    kernels: dict[str, Any] = {}
    weights, biases = {}, {}
    for name, (kernel, *bias) in arrays.items():
        spec = specs[name] if specs else [PartitionSpec()] * 2
        if isinstance(kernel, Packed):
            kernels[name] = Packed(*map(_gathered_by, kernel, spec[0])) if specs else kernel
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

    def linear(name: str, x: jax.Array) -> jax.Array:
        y = expert_product(x, kernels[name], counts, weights.get(name))
        if name in biases:
            bias, rows = biases[name], kernels[name].shape[1]
            if name == "down_proj" and rows < config.intermediate_size:  # the devices' products are summed
                bias = jnp.where(lax.axis_index("tensor") == 0, bias, 0)
            y = y + jnp.repeat(bias, counts, axis=0, total_repeat_length=len(x)).astype(x.dtype)
        return y if used is None else jnp.where(used, y, 0)

    if config.swiglu:
        (slope, limit), both = config.swiglu, linear("gate_up_proj", x)
        gate, up = jnp.minimum(both[:, 0::2], limit), jnp.clip(both[:, 1::2], -limit, limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(slope * gate)
    else:
        inner = ACTIVATIONS[config.activation](linear("gate_proj", x)) * linear("up_proj", x)
    return linear("down_proj", inner)


CAPACITY = 2
"""Pairs that a device sends to another in one round, in multiples of an even share."""


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
        each = own.reshape(self.devices, -1)  # of every device, sorted by expert
        counts = (each[:, :, None] == jnp.arange(self.experts + 1)).sum(1, dtype=jnp.int32)
        total = counts.sum(0)
        # Before a row are those of lower experts, those of its expert from earlier devices, and some of its own device.
        begin = (
            (jnp.cumsum(total) - total) + (jnp.cumsum(counts, 0) - counts) - (jnp.cumsum(counts, 1) - counts)
        )
        place = jnp.take_along_axis(begin, each, 1) + jnp.arange(each.shape[1])
        used = (jnp.arange(len(own)) < total[:-1].sum())[:, None]
        return jnp.argsort(own, stable=True), place.reshape(-1), total[:-1], used


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
    trained = {name: w for name, w in weights.items() if not isinstance(w, Packed)}
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
    apart = d_pairs[place_of_pair].reshape(len(x), exchange.per_token, -1)
    d_x = apart.astype(jnp.float32).sum(1).astype(x.dtype)
    return d_x, None, {name: d_kernels.get(name) for name in weights}, d_biases, None


exchanged.defvjp(_exchanged_forward, _exchanged_backward)


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
        self.watch: Watch | None = None

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
        score, (groups, allowed) = jax.nn.sigmoid(logits), c.expert_groups
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

    def __call__(self, x: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """[B, T, D] → the same. seen: what the router reads, [B, T, D]; None: the same."""
        c, tokens = self.config, x.reshape(-1, x.shape[-1])
        logits = self.logits(tokens if seen is None else seen.reshape(tokens.shape))
        chosen = self.choose(logits)
        if self.watch is not None:
            chosen = self.watch.see(c, logits, chosen)
        weight = self.weigh(logits, chosen)
        k = (*x.shape[:2], -1)
        mixed = self.experts(x, weight.reshape(k), chosen.reshape(k))
        if not c.shared_size:
            return mixed
        shared = self.shared_expert(x)
        if c.shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_expert_gate(x))
        return mixed + shared
