"""One decoder-only transformer for all families of `families.ARCHITECTURES`.

Parameters are a nested dict under Hugging Face's names, with `kernel` [in, out] for a linear layer; layers are stacked,
float32 [layers, …]. The dict is merged with the cached module definition inside jit, which costs nothing at run time.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh

from rlhf_core.contracts import ATTENTION, AttentionOver, TensorParallel
from rlhf_core.contracts.models import Head
from rlhf_core.errors import InputError
from rlhf_core.mesh import (
    context_mesh,
    cut_rows,
    join_zigzag,
    of_cut_rows,
    row_parts,
    take_tokens,
    with_room,
    zigzag,
)
from rlhf_core.models import decode_layout, gemma4, weights
from rlhf_core.models.attention import attend, attend_at, attend_blocks
from rlhf_core.models.attention_cached import attend_cached, attend_groups, cache_parts
from rlhf_core.models.attention_pieces import attend_pieces
from rlhf_core.models.config import (
    DecoderConfig,
    LayerKinds,
    Remat,
    Rope,
    Stack,
    layer_kinds,
    layer_loops,
    remat_policy,
    repetition,
)
from rlhf_core.models.decode_layout import is_joined, separate, stack_of, unmerged
from rlhf_core.models.definition import Definition
from rlhf_core.models.experts import Experts, Recorder, recorder_of
from rlhf_core.models.kernels import find_kernels
from rlhf_core.models.layers import MLP, Attention, Embedding, Linear, RMSNorm
from rlhf_core.models.lora import ROUTER, Lora, linear_modules
from rlhf_core.models.quantized import Quantization, plain
from rlhf_core.models.recurrence import MIXERS, Order, chunk_paths, previous_tokens
from rlhf_core.models.rope import rotation, shared_rotation
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.devices import platform

Params = dict[str, Any]
UNROLLED_LAYERS = 8
"""Up to this many layers are unrolled where all activations are kept: nothing is copied into or out of stacked ones."""


Mix: TypeAlias = Callable[[int, Any, int | None, Any, jax.Array], jax.Array]
"""(number of a layer, its rotation, its window or None, its attention or another mixer, the mixer's input [B, T, D]) →
the mixer's output [B, T, D]."""


class Cache(NamedTuple):
    """The KV cache of a batch, in the layouts that a single query reads fastest; S is the cache length.

    One array per layer, so that writing a token touches nothing else: keys [B, kv heads, head_dim, S] and values
    [B, kv heads, S, head_dim], both in the compute dtype; positions int32 [B, S]. A layer with a state has the two
    parts of its state in their place; one that attends to another layer's keys and values has None.
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    positions: jax.Array


class Layer(nnx.Module):
    """Attention and gated MLP, normalised before, after, or both. Holds stacked parameters, runs on one layer's.

    The norms have Hugging Face's names: where layers normalise before only, `post_attention_layernorm` is the MLP's.
    """

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        norm = functools.partial(RMSNorm, config, (config.num_layers,), config.hidden_size)
        self.norms, self.residual_scale = config.norms, config.residual_scale
        self.mixer = config.mixer
        setattr(self, self.mixer, MIXERS.get(self.mixer, Attention)(config, rngs))
        self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)
        self.post_attention_layernorm = norm()
        if self.norms != "after":
            self.input_layernorm = norm()
        if self.norms == "both":
            self.pre_feedforward_layernorm = norm()
        if self.norms != "before":
            self.post_feedforward_layernorm = norm()

    def __call__(self, x: jax.Array, mix: Callable[[Any, jax.Array], jax.Array]) -> jax.Array:
        """[B, T, D] → the same. mix: (attention or another mixer, its input [B, T, D]) → its output [B, T, D]."""
        mixed = mix(getattr(self, self.mixer), self.normed(x))
        if self.norms == "before":
            x = x + self.scaled(mixed)
            return x + self.scaled(self.mlp(self.post_attention_layernorm(x)))
        x = x + self.post_attention_layernorm(mixed)
        inner = x if self.norms == "after" else self.pre_feedforward_layernorm(x)
        return x + self.post_feedforward_layernorm(self.mlp(inner))

    def normed(self, x: jax.Array) -> jax.Array:
        return x if self.norms == "after" else self.input_layernorm(x)

    def scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_scale == 1 else x * jnp.asarray(self.residual_scale, x.dtype)


def make_layers(config: DecoderConfig, rngs: Any) -> Any:
    """Make the layers of one kind."""
    return gemma4.Layer(config, rngs) if config.gemma4 else Layer(config, rngs)


class Stacks(nnx.Module):
    """The layers of a model with several kinds of them, an attribute per kind."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        for kind, stack in config.stacks.items():
            setattr(self, kind, make_layers(stack.config, rngs))


class Trunk(nnx.Module):
    """The parameters of the layers, and of the language-model or reward head."""

    def __init__(
        self,
        config: DecoderConfig,
        head: Head,
        lora: Lora | None,
        rngs: Any,
        quantized: Quantization | None = None,
    ) -> None:
        linear = functools.partial(Linear, rngs, (), std=config.initializer_range, bias=False)
        self.embed_tokens = Embedding(config, rngs)
        if config.gemma4 and config.gemma4.per_layer[1]:
            self.per_layer_inputs = gemma4.PerLayerInputs(config, rngs)
        self.layers = Stacks(config, rngs) if config.kinds else make_layers(config, rngs)
        self.norm = RMSNorm(config, (), config.hidden_size)
        if head == "score":
            self.score = linear((config.hidden_size, 1), axes=("embed", None))
        elif not config.tied:
            self.lm_head = linear((config.hidden_size, config.vocab_size), axes=("embed", "vocab"))
        if lora is not None:
            for target in lora.targets:
                functools.reduce(getattr, target.split("."), self.layers).adapt(lora, rngs)
        if quantized is not None:
            for path, module in list(nnx.iter_modules(self.layers)):
                if isinstance(module, Linear) and path[-1] != ROUTER:
                    module.quantize(quantized)


@cached
def _tree(
    config: DecoderConfig, head: Head, lora: Lora | None, quantized: Quantization | None
) -> tuple[Any, Params, Params]:
    """Return the module without its arrays, the arrays' shapes, and their logical axes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Trunk(config, head, lora, nnx.Rngs(0), quantized)))
    names = jax.tree.map(
        lambda variable: variable.get_metadata("axes"), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return graph, nnx.to_pure_dict(state), nnx.to_pure_dict(names)


@cached
def _parts(
    config: DecoderConfig,
    fused: bool,
    apart: bool = False,
    lora: Lora | None = None,
    quantized: Quantization | None = None,
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the parts around the layers, by name, and one layer of each kind, without their arrays. fused: whether
    projections are joined. apart: as in the config. lora: adapters that are not merged.
    """
    prepared = replace(config, fused=fused, apart=apart)
    if lora is not None and config.fused and not fused:
        lora = replace(lora, targets=separate(lora.targets))
    whole = nnx.eval_shape(lambda: Trunk(prepared, "lm", lora, nnx.Rngs(0), quantized))
    layers = {kind: nnx.split(stack_of(whole.layers, kind))[0] for kind in config.stacks}
    around = [name for name in ("embed_tokens", "per_layer_inputs", "norm") if hasattr(whole, name)]
    return {name: nnx.split(getattr(whole, name))[0] for name in around}, layers


@dataclass(frozen=True, eq=False, kw_only=True)
class Decoder(Definition):
    """One decoder-only transformer for all families of `families.ARCHITECTURES`.

    config: its architecture.
    dtype: of the computation; None: float32 on CPU, bfloat16 on accelerators. Parameters are float32.
    remat: what the backward pass recomputes: "none", "dots" (all but matrix products with weights), "full" (all
        but each layer's input); "auto" is "none" while the activations are small, else "dots".
    attention: over rows, see `rlhf_core.contracts.AttentionOver`; None: `attention.attend`.
    lora: adapters of some linear layers; None: no adapters.
    quantized: how the matrices of the layers are held that no update changes, see `quantized.layout`; None: float32.
    """

    config: DecoderConfig
    dtype: str | None = None
    remat: Remat = "auto"
    attention: AttentionOver | None = None
    lora: Lora | None = None
    quantized: Quantization | None = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def compute_dtype(self) -> Any:
        return jnp.dtype(self.dtype or ("float32" if platform() == "cpu" else "bfloat16"))

    def _check_length(self, length: int) -> None:
        """Raise InputError for rows or caches longer than a longrope rotary embedding covers."""
        limits = [rope.original_length for rope in self.config.ropes if rope.kind == "longrope"]
        if limits and length > min(limits):
            raise InputError(
                f"rows of {length} tokens are longer than the original_max_position_embeddings of this model's "
                f"longrope, {min(limits)}, beyond which it rotates positions differently; keep sequences and rows "
                "within them"
            )

    def with_lora(self, lora: Lora | None) -> Self:
        return replace(self, lora=lora)

    def quantized_as(self, kind: Quantization | None) -> Self:
        return replace(self, quantized=kind)

    def module_names(self) -> dict[str, list[str]]:
        names = weights.tensor_names(self)
        stored, prefix = self.config.prefix, weights.module_prefix(self.config)
        return {
            module: [
                (prefix + name.removeprefix(stored) if stored else name).removesuffix(".weight")
                for name in names["layers", *module.split("."), "kernel"].tolist()
            ]
            for module in linear_modules(self.with_lora(None).quantized_as(None).abstract_params())
        }

    @property
    def _tree(self) -> tuple[Any, Params, Params]:
        return _tree(self.config, self.head, self.lora, self.quantized)

    def abstract_params(self) -> Params:
        return self._tree[1]

    def logical_axes(self) -> Params:
        return self._tree[2]

    def init(self, key: jax.Array) -> Params:
        """Draw parameters, float32: normal(0, initializer_range) for matrices, factors of 1 for norms, 0 for biases and
        quantized matrices.
        """
        return nnx.to_pure_dict(
            nnx.state(Trunk(self.config, self.head, self.lora, nnx.Rngs(params=key), self.quantized))
        )

    def load(self, directory: Path, shardings: Any) -> Params:
        return weights.load(self, directory, shardings)

    def save(self, params: Params, directory: Path, dtype: str) -> None:
        weights.save(self, params, directory, dtype)

    def _forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        visible_until: jax.Array,
        *,
        keep: bool = False,
        at: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Compute (hidden states [B, T, D] after the last norm, or [B, n, D] of the tokens `at`, int32 [B, n]; with
        `keep`, every layer's keys and values as in Cache, else None).
        """
        self._check_length(tokens.shape[1])
        mesh = None if keep else context_mesh(tokens)
        if mesh is not None:
            hidden = self._forward_pieces(mesh, params, tokens, positions, visible_until)
            return hidden if at is None else take_tokens(hidden, at), None
        mix = self._over_rows(positions, visible_until)
        return self._forward_with(
            mix, recorder_of(self), params, (tokens, positions, visible_until), keep, at
        )

    def _forward_pieces(
        self,
        mesh: AbstractMesh,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        visible_until: jax.Array,
    ) -> jax.Array:
        """Compute the hidden states of rows that `context` cuts: each device runs its pieces through the layers."""
        time, size = tokens.shape[1], mesh.shape["context"]
        # Tokens that blocks of attention divide.
        step = 128 if time >= 1024 * size or platform() == "tpu" else 16
        whole = [with_room(x, mesh, 2 * step) for x in (tokens, positions, visible_until)]
        order, recorder = zigzag(whole[0].shape[1], size), recorder_of(self)

        def cut(x: jax.Array) -> jax.Array:
            return cut_rows(with_room(x, mesh, 2 * step)[:, order], mesh)

        pieces = tuple(map(cut, whole))
        if recorder:
            given = [None if x is None else cut(x) for x in (recorder.counted, recorder.routes)]
            recorder = replace(recorder, counted=given[0], routes=given[1])
        with of_cut_rows():
            mix = self._over_rows(whole[1], whole[2], mesh)
            hidden, _ = self._forward_with(mix, recorder, params, pieces)
        return join_zigzag(hidden, mesh)[:, :time]

    def _forward_with(
        self,
        mix: Callable[..., jax.Array],
        recorder: Recorder | None,
        params: Params,
        rows: tuple[jax.Array, ...],
        keep: bool = False,
        at: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Compute `_forward`. mix: from `_over_rows`. rows: tokens, positions, visible_until, or pieces of them."""
        (c, dtype), (tokens, positions, visible_until) = (self.config, self.compute_dtype), rows
        trunk: Trunk = nnx.merge(self._tree[0], params)
        rotations = self._rotations(positions, shared_rotation)
        policy = remat_policy(c, self.remat, tokens.size * row_parts(), dtype.itemsize)
        x = trunk.embed_tokens(tokens, dtype)
        given = trunk.per_layer_inputs(tokens, x) if hasattr(trunk, "per_layer_inputs") else None
        own = next((i for i, source in enumerate(c.sources) if source != i), c.num_layers)
        shared: list[
            Any
        ] = []  # what the layers keep that have keys and values, `own` of them, for those that have none

        def rope_of(stack: Stack) -> Callable[[LayerKinds], tuple[jax.Array, ...]]:
            ropes = [rotations[rope, stack.config.head_dim] for rope in stack.config.ropes]
            if len(ropes) == 1:
                return lambda kind: ropes[0]
            several = jax.tree.map(lambda *each: jnp.stack(each), *ropes)
            return lambda kind: jax.tree.map(lambda each: each[kind.rope], several)

        def prepared(kind: str, stack: Stack) -> tuple[Any, tuple[Any, LayerKinds]]:
            graph, state = nnx.split(stack_of(trunk.layers, kind))
            rope = rope_of(stack)

            def one(x: jax.Array, slice_: tuple[Any, LayerKinds]) -> tuple[jax.Array, Any]:
                layer, it = nnx.merge(graph, slice_[0]), slice_[1]
                kept = [*shared]
                more = () if it.given is None else (it.given,)
                watch = recorder.watch(layer, it.routes) if recorder else None
                x = layer(x, functools.partial(mix, kept, rope(it), it.window), *more)
                keeps = kept[-1] if keep or own < c.num_layers else None
                return x, (keeps, watch.load if watch else None)

            if policy is not None:
                # Scanned: in unrolled layers, XLA on CPU merges the recomputation with the first computation.
                one = jax.checkpoint(one, policy=policy, prevent_cse=False)
            inputs = None if given is None else given[jnp.asarray(stack.layers)]
            routes = recorder.routes_of(self, stack.layers) if recorder else None
            kinds = layer_kinds(stack.config)._replace(given=inputs, routes=routes)
            return one, (nnx.to_pure_dict(state), kinds)

        stacks = {kind: prepared(kind, stack) for kind, stack in c.stacks.items()}
        # Layers with a state take about three times as long to compile as attention: each is written out once.
        unroll = policy is None and c.num_layers <= UNROLLED_LAYERS and not self.has_states
        if at is None or not unroll or c.kinds or recorder:
            kinds = c.kinds or ("",) * c.num_layers
            x, outputs = run_layers(kinds[:own], stacks, x, unroll=unroll)
            if own < len(kinds):
                shared += [keeps for keeps, _ in outputs]
                x, more = run_layers(kinds[own:], stacks, x, unroll=unroll)
                outputs += more
            kept, loads = zip(*outputs, strict=True)
            if recorder:
                recorder.add(self, loads)
            return trunk.norm(x if at is None else _read(x, at)), kept
        # The last layer computes keys and values of all tokens, and everything else only for `at`.
        body, layers = stacks[""]
        x, _ = lax.scan(body, x, jax.tree.map(lambda each: each[:-1], layers), unroll=True)
        last, kind = jax.tree.map(lambda each: each[-1], layers)
        layer, rope = nnx.merge(nnx.split(trunk.layers)[0], last), rope_of(c.stacks[""])(kind)
        _, k, v, _ = layer.self_attn.project(layer.normed(x), rope)
        rope = jax.tree.map(lambda angle: _read(angle, at), rope)

        def over(q: jax.Array, *_: jax.Array) -> jax.Array:
            cap = c.attention_softcap
            more = layer.self_attn.options
            return attend_at(q, k, v, at, positions, visible_until, window=kind.window, softcap=cap, **more)

        return trunk.norm(layer(_read(x, at), lambda attention, y: attention(y, rope, over))), None

    def _over_rows(
        self, positions: jax.Array, visible_until: jax.Array, mesh: AbstractMesh | None = None
    ) -> Callable[..., jax.Array]:
        """Make the function that mixes the tokens of rows: a `Mix` with a list for the layer's number, which gets
        what `Cache` has of the layer. mesh: what cuts the rows that are mixed, but not these, into pieces.
        """
        over, cap = self.attention or attend, self.config.attention_softcap
        if mesh is not None:
            over = self.attention or find_kernels(ATTENTION) or attend_blocks
        order: Order | None = None
        if self.has_states:
            paths = chunk_paths(positions, visible_until)
            order = Order(previous_tokens(positions, visible_until), paths, mesh)

        def mix(kept: list[Any], rope: Any, window: Any, mixer: Any, x: jax.Array) -> jax.Array:
            if not isinstance(mixer, Attention):
                out, state = mixer.over_rows(x, order)
                kept.append(state)
                return out

            def attention(q: jax.Array, k: Any, v: Any) -> jax.Array:
                if k is None:
                    keys, v = kept[mixer.source or 0]
                    k = keys.swapaxes(2, 3)
                    kept.append((None, None))
                else:
                    kept.append((k.swapaxes(2, 3), v))
                more = mixer.options
                if mesh is not None:
                    of_rows = positions, visible_until
                    return attend_pieces(over, mesh, (q, k, v), of_rows, window, softcap=cap, **more)
                return over(q, k, v, positions, visible_until, window=window, softcap=cap, **more)

            return mixer(x, rope, attention)

        return mix

    def hidden(
        self, params: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
    ) -> jax.Array:
        return self._forward(params, tokens, positions, visible_until)[0]

    def hidden_at(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        visible_until: jax.Array,
        at: jax.Array,
    ) -> jax.Array:
        return self._forward(params, tokens, positions, visible_until, at=at)[0]

    def unembedding(self, params: Params) -> tuple[jax.Array, float | None]:
        kernel = params["embed_tokens"]["embedding"].T if self.config.tied else params["lm_head"]["kernel"]
        if self.config.logit_scale != 1:
            kernel = kernel * jnp.asarray(self.config.logit_scale, kernel.dtype)
        return kernel, self.config.logit_softcap

    def score(self, params: Params, hidden: jax.Array) -> jax.Array:
        # By default, accelerators round a product's float32 inputs to TF32 or bfloat16.
        return jnp.matmul(
            hidden.astype(jnp.float32), params["score"]["kernel"][:, 0], precision=lax.Precision.HIGHEST
        )

    def prefill(
        self, params: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
    ) -> tuple[jax.Array, Cache]:
        if isinstance(params["layers"], tuple):
            outputs, cache = self._prefill(params, tokens, positions, visible_until)
            return outputs[-1], cache
        states, kept = self._forward(params, tokens, positions, visible_until, keep=True)
        keys, values = zip(*kept, strict=True)
        return states, Cache(keys, values, positions)

    def layer_outputs(
        self, params: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
    ) -> Iterator[tuple[str, jax.Array]]:
        """Yield (name, output [rows, time, hidden]) of every part of the model, to find where a fault begins."""
        layers = [f"layer {i} (of 0 to {self.config.num_layers - 1})" for i in range(self.config.num_layers)]
        outputs = self._prefill(self.prepare(params), tokens, positions, visible_until)[0]
        return zip(["its embedding", *layers, "its last norm"], outputs, strict=True)

    def _prefill(
        self, weights: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
    ) -> tuple[list[jax.Array], Cache]:
        """Compute what `_run_prepared` returns, and the cache of the tokens."""
        self._check_length(tokens.shape[1])
        rotations = self._rotations(positions, shared_rotation)
        rows = self._over_rows(positions, visible_until)
        kept: list[Any] = []

        def mix(i: int, rope: Any, window: int | None, *inputs: Any) -> jax.Array:
            return rows(kept, rope, None if window is None else jnp.int32(window), *inputs)

        outputs = self._run_prepared(weights, tokens, rotations, mix)
        keys, values = zip(*kept, strict=True)
        return outputs, Cache(keys, values, positions)

    def _rotations(self, positions: jax.Array, make: Callable[..., Any]) -> dict[tuple[Rope, int], Any]:
        """Make {(rotary embedding, head_dim): its rotation} of all layers."""
        every = [(rope, each.head_dim) for each, _ in self.config.stacks.values() for rope in each.ropes]
        return {(rope, size): make(rope, size, positions) for rope, size in dict.fromkeys(every)}

    def _run_prepared(
        self, weights: Params, tokens: jax.Array, rotations: Mapping[tuple[Rope, int], Any], mix: Mix
    ) -> list[jax.Array]:
        """Run tokens, int32 [B, T], through the layers; return the outputs, [B, T, D], of the embedding, of every layer
        and of the last norm.

        weights: from `prepare`. rotations: from `_rotations`.
        """
        fused = any(map(is_joined, weights["layers"]))
        separate = any("in_proj_q" in layer.get("linear_attn", {}) for layer in weights["layers"])
        separate |= any("in_proj_inner" in layer.get("conv", {}) for layer in weights["layers"])
        around, blocks = _parts(self.config, fused, separate, unmerged(self), plain(self.quantized))
        parts = {name: nnx.merge(graph, weights[name]) for name, graph in around.items()}
        outputs = [parts["embed_tokens"](tokens, self.compute_dtype)]
        given = parts["per_layer_inputs"](tokens, outputs[0]) if "per_layer_inputs" in parts else None
        recorder = recorder_of(self)
        for i, parameters in enumerate(weights["layers"]):
            kind, n = self.config.at(i)
            c = self.config.stacks[kind].config
            rope = c.ropes[c.layer_ropes[n] if c.layer_ropes else 0]
            layer = nnx.merge(blocks[kind], parameters)
            own = functools.partial(mix, i, rotations[rope, c.head_dim], c.windows[n])
            watch = recorder.watch(layer, None) if recorder else None
            outputs.append(layer(outputs[-1], own, *(() if given is None else (given[i],))))
            if recorder and watch and watch.chosen is not None:
                recorder.chosen.append(watch.chosen)
        return [*outputs, parts["norm"](outputs[-1])]

    def cache_parts(self, length: int) -> tuple[int, ...]:
        return cache_parts(length)

    def ring(self, cache: Cache, length: int, slot: jax.Array | int) -> Cache:
        self._check_length(length)

        def rolled(x: jax.Array, axis: int) -> jax.Array:
            padding = [(0, 0)] * x.ndim
            padding[axis] = (length - x.shape[axis], 0)
            return jnp.roll(jnp.pad(x, padding), slot, axis)

        keys, values = list(cache.keys), list(cache.values)
        for i in range(self.config.num_layers):
            if not self._has_state(i) and self.config.sources[i] == i:
                keys[i], values[i] = rolled(keys[i], 3), rolled(values[i], 2)
        return Cache(tuple(keys), tuple(values), rolled(cache.positions, 1))

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state in place of keys and values."""
        return any(map(self._has_state, range(self.config.num_layers)))

    def _has_state(self, layer: int) -> bool:
        """Tell whether a layer keeps a state in place of keys and values."""
        return self.config.stacks[self.config.at(layer)[0]].config.mixer != "self_attn"

    def decode(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        slot: jax.Array | int,
    ) -> tuple[jax.Array, Cache]:
        def over(q: jax.Array, i: int, cache: Cache, window: int | None, **more: Any) -> jax.Array:
            place = jnp.arange(visible.shape[1]) if in_order else cache.positions
            seen = visible & (positions[:, None] - place < window) if window else visible
            cap = self.config.attention_softcap
            more |= {"in_order": in_order}
            return attend_cached(q, cache.keys[i], cache.values[i], seen[:, None], cap, **more)

        in_order = jnp.ndim(slot) > 0

        states, cache = self._extend(params, cache, tokens[:, None], positions[:, None], slot, over)
        return states[:, 0], cache

    def decode_groups(
        self,
        params: Params,
        prompts: Cache,
        used: jax.Array,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        step: jax.Array | int,
    ) -> tuple[jax.Array, Cache]:
        entries = jnp.arange(cache.positions.shape[1])
        self._check_length(used.shape[1] + len(entries))
        own, read = entries <= step, used[:, None]
        age = positions.reshape(len(used), -1, 1) - prompts.positions[:, None]  # [P, G, time]

        def over(q: jax.Array, i: int, cache: Cache, window: int | None, **more: Any) -> jax.Array:
            near, recent = (read & (age < window), own & (step - entries < window)) if window else (read, own)
            before = (prompts.keys[i], prompts.values[i], near)
            after = (cache.keys[i], cache.values[i], recent)
            return attend_groups(q[:, :, :, 0], before, after, self.config.attention_softcap, **more)[:, None]

        states, cache = self._extend(params, cache, tokens[:, None], positions[:, None], step, over)
        return states[:, 0], cache

    def extend(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        start: jax.Array,
        count: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        self._check_length(cache.positions.shape[1])
        count = jnp.full_like(start, tokens.shape[1]) if count is None else count
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        age = positions[:, :, None] - jnp.arange(cache.positions.shape[1])  # [B, T, S]

        def over(q: jax.Array, i: int, cache: Cache, window: int | None, **more: Any) -> jax.Array:
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            cap = self.config.attention_softcap
            return attend_cached(q, cache.keys[i], cache.values[i], seen, cap, in_order=True, **more)

        return self._extend(params, cache, tokens, positions, start, over, count)

    def _extend(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        slot: jax.Array | int,
        over: Callable[..., jax.Array],
        count: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Compute tokens, int32 [B, T], that follow those of a cache: (hidden states [B, T, D], cache with them).

        slot: the entry of the first of them. over: (scaled queries [B, K, G, T, h], number of a layer, the cache with
        the tokens of that layer, its window or None; sinks, if it has any) → attention's output [B, T, K·G·h].
        count: int32 [B], the tokens of a row before its padding; None: T is 1.
        """
        weights = params if isinstance(params["layers"], tuple) else self.prepare(params)
        keys, values = list(cache.keys), list(cache.values)
        placed = _placed(cache.positions, positions, slot, 1)

        def mix(i: int, rope: Any, window: int | None, mixer: Any, x: jax.Array) -> jax.Array:
            if not isinstance(mixer, Attention):
                state = jax.tree.map(
                    functools.partial(_zero_where, positions[:, 0] == 0), (keys[i], values[i])
                )
                if count is None:
                    out, (keys[i], values[i]) = mixer.next(x[:, 0], state)
                    return out[:, None]
                out, (keys[i], values[i]) = mixer.extend(x, state, count)
                return out

            def attention(q: jax.Array, k: Any, v: Any) -> jax.Array:
                if k is not None:
                    keys[i] = _placed(keys[i], k.swapaxes(2, 3), slot, 3)
                    values[i] = _placed(values[i], v, slot, 2)
                source, whole = self.config.sources[i], Cache(tuple(keys), tuple(values), placed)
                return over(q, source, whole, window, **mixer.options)

            return mixer(x, rope, attention)

        states = self._run_prepared(weights, tokens, self._rotations(positions, rotation), mix)[-1]
        return states, Cache(tuple(keys), tuple(values), placed)

    def prepare(self, params: Params) -> Params:
        return decode_layout.prepare(self, params)

    @property
    def tensor_parallel(self) -> TensorParallel:
        return decode_layout.tensor_parallel(self)


def run_layers(
    kinds: Sequence[str], stacks: Mapping[str, tuple[Any, Any]], x: jax.Array, *, unroll: bool
) -> tuple[jax.Array, list[Any]]:
    """Run layers one after the other; return the result and what each kept.

    Layers of one kind in a row are a loop, and so is a repeating pattern of such loops: a kind's layer is compiled once
    in each. stacks: {kind: (function of x and one layer's parameters → x and what is kept, the stacked parameters)}.
    """

    def run(x: jax.Array, loops: Sequence[tuple[str, int]], take: Any) -> tuple[jax.Array, list[Any]]:
        kept: list[Any] = []
        for kind, count in loops:
            x, keeps = lax.scan(stacks[kind][0], x, take(kind, count), unroll=unroll)
            kept += _each(keeps, count)
        return x, kept

    loops = layer_loops(kinds)
    before, period, repeats = repetition(loops)
    pattern, take = (
        loops[before : before + period],
        _taker({kind: stack for kind, (_, stack) in stacks.items()}),
    )
    x, kept = run(x, loops[:before], take)
    if repeats:
        per = Counter[str]()
        for kind, count in pattern:
            per[kind] += count
        layers = {
            kind: jax.tree.map(
                lambda each: each.reshape(repeats, -1, *each.shape[1:]), take(kind, count * repeats)
            )
            for kind, count in per.items()
        }
        x, keeps = lax.scan(lambda x, own: run(x, pattern, _taker(own)), x, layers, unroll=unroll)
        kept += itertools.chain.from_iterable(_each(keeps, repeats))
    x, more = run(x, loops[before + period * repeats :], take)
    return x, kept + more


def _taker(stacks: Mapping[str, Any]) -> Callable[[str, int], Any]:
    """Make a function of (kind, count) that returns the parameters of the next layers of a kind."""
    used = Counter[str]()

    def take(kind: str, count: int) -> Any:
        first = used[kind]
        used[kind] += count
        return jax.tree.map(lambda each: each[first : first + count], stacks[kind])

    return take


def _each(stacked: Any, count: int) -> list[Any]:
    """Split a tree of stacked arrays into one tree for each of `count` layers."""
    return [jax.tree.map(lambda each: each[i], stacked) for i in range(count)]  # noqa: B023


def _read(x: jax.Array, at: jax.Array) -> jax.Array:
    """Gather x[b, at[b, j]]: [B, T, …] → [B, n, …]."""
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)


def _zero_where(rows: jax.Array, x: jax.Array) -> jax.Array:
    """Set the rows of `x`, [B, …], to 0 where `rows`, bool [B]."""
    return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), 0, x)


def _placed(x: Any, new: jax.Array, slot: jax.Array | int, axis: int) -> Any:
    """Write `new`, [B, …], into the cache `x` from index `slot` of `axis` on: one for all rows, or one for each. In a
    tuple of parts, it is one entry.
    """
    if isinstance(x, tuple):
        ends = itertools.accumulate(part.shape[axis] for part in x)
        return tuple(
            _placed_inside(part, new.squeeze(axis), slot - end + part.shape[axis], axis)
            for part, end in zip(x, ends, strict=True)
        )
    if jnp.ndim(slot) == 0:
        start: list[jax.Array | int] = [0] * x.ndim
        start[axis] = slot
        return lax.dynamic_update_slice(x, new, start)
    over_rows: Any = jax.vmap(lambda row, part, at: lax.dynamic_update_slice_in_dim(row, part, at, axis - 1))
    return over_rows(x, new, slot)


def _placed_inside(part: jax.Array, new: jax.Array, at: jax.Array | int, axis: int) -> jax.Array:
    """Write an entry of each row, [B, …], to index `at`, int32 [B], of `axis`, if there is one."""
    size = part.shape[axis]
    at = jnp.where((at >= 0) & (at < size), at, size)
    index = (jnp.arange(len(part)), *[slice(None)] * (axis - 1), at)
    return part.at[index].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)
