"""One decoder-only transformer for all families of `families.ARCHITECTURES`.

Rows, of training and of scoring: `hidden`, `_run_stacked` with a `RowReader`. Decoding: `_run_cached`,
`_run_prepared` with a `CacheReader`. A layer, `layer.Layer`, calls `attend` or `recur` of its context, and so
computes the same in both. Hidden states become log-probabilities in `rlhf_core.logprobs`, in chunks, and a next token
in `sampling.next_token`.

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
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh

import rlhf_core.models.decode_layout as decode_layout
import rlhf_core.models.weights as weights
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
from rlhf_core.models.attention import attend, attend_blocks
from rlhf_core.models.attention_cached import cache_parts
from rlhf_core.models.config import (
    DecoderConfig,
    PerLayer,
    Remat,
    Rope,
    Stack,
    layer_loops,
    per_layer,
    remat_policy,
    repetition,
)
from rlhf_core.models.decode_layout import is_joined, separate, stack_of, unmerged
from rlhf_core.models.definition import Definition
from rlhf_core.models.experts import Recorder, Routing, recorder_of
from rlhf_core.models.kernels import find_kernels
from rlhf_core.models.layer import Recurrent, has_state, layer_of, take_rows
from rlhf_core.models.layers import Embedding, Linear, RMSNorm
from rlhf_core.models.lora import ROUTER, Lora, linear_modules
from rlhf_core.models.quantized import Quantization, plain
from rlhf_core.models.readers import (
    CacheReader,
    ChunkReader,
    GroupReader,
    LayerContext,
    Reader,
    RowReader,
    TokenReader,
    written,
)
from rlhf_core.models.rope import rotation, shared_rotation
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.machine import platform

Params = dict[str, Any]
UNROLLED_LAYERS = 8
"""Up to this many layers are unrolled where all activations are kept: nothing is copied into or out of stacked ones."""


class Cache(NamedTuple):
    """The cache of a batch.

    layers: each layer's `Aux.cache`, rotated keys [B, K, h, S] and values [B, K, S, h], or a state [B, …]; apart, so
    that writing a token touches nothing else. positions: int32 [B, S], of the entries of keys and values.
    """

    layers: tuple[Any, ...]
    positions: jax.Array


class Stacks(nnx.Module):
    """The layers of a model with several kinds of them, an attribute per kind."""

    def __init__(self, config: DecoderConfig, rngs: Any) -> None:
        for kind, stack in config.stacks.items():
            setattr(self, kind, layer_of(stack.config)(stack.config, rngs))


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
        layer = layer_of(config)
        if layer.given is not None:
            self.per_layer_inputs = layer.given(config, rngs)
        self.layers = Stacks(config, rngs) if config.kinds else layer(config, rngs)
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

    def axes_of(path: Any, variable: Any) -> tuple[str | None, ...]:
        axes: tuple[str | None, ...] = variable.get_metadata().get("axes", ())
        if len(axes) != len(variable.shape):
            name = ".".join(str(part.key) for part in path)
            raise InputError(
                f"'{name}' of {config.model_type} has {len(variable.shape)} dimensions and axes {axes}; make it "
                "nnx.Param(values, axes=(…)) with a name or None for each dimension"
            )
        return axes

    names = jax.tree.map_with_path(axes_of, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
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
        stored = self.config.prefix
        prefix = weights.module_prefix(self.config)
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
        `keep`, what later tokens read of each layer, as in Cache, otherwise nothing to be used).
        """
        self._check_length(tokens.shape[1])
        mesh = None if keep else context_mesh(tokens)
        if mesh is not None:
            hidden = self._forward_pieces(mesh, params, tokens, positions, visible_until)
            return hidden if at is None else take_tokens(hidden, at), None
        reader = self._row_reader(positions, visible_until)
        return self._run_stacked(reader, recorder_of(self), params, tokens, positions, keep=keep, at=at)

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
        order = zigzag(whole[0].shape[1], size)
        recorder = recorder_of(self)

        def cut(x: jax.Array) -> jax.Array:
            return cut_rows(with_room(x, mesh, 2 * step)[:, order], mesh)

        pieces = tuple(map(cut, whole[:2]))
        if recorder:
            given = [None if x is None else cut(x) for x in (recorder.counted, recorder.routes)]
            recorder = replace(recorder, counted=given[0], routes=given[1])
        with of_cut_rows():
            reader = self._row_reader(whole[1], whole[2], mesh)
            hidden, _ = self._run_stacked(reader, recorder, params, *pieces)
        return join_zigzag(hidden, mesh)[:, :time]

    def _row_reader(
        self, positions: jax.Array, visible_until: jax.Array, mesh: AbstractMesh | None = None
    ) -> RowReader:
        """Make the reader of rows. mesh: what cuts the rows that layers get into pieces."""
        over = self.attention or attend
        if mesh is not None:
            over = self.attention or find_kernels(ATTENTION) or attend_blocks
        reader = RowReader(positions=positions, visible_until=visible_until, over=over, mesh=mesh)
        mixers = dict.fromkeys(layer_of(stack.config).mixer for stack in self.config.stacks.values())
        orders = {mixer: mixer.order(reader) for mixer in mixers if issubclass(mixer, Recurrent)}
        return replace(reader, orders=orders)

    def _run_stacked(
        self,
        reader: RowReader,
        recorder: Recorder | None,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        keep: bool = False,
        at: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Compute `_forward` with stacked parameters. tokens, positions: int32 [B, T], of rows or pieces of them."""
        c = self.config
        trunk: Trunk = nnx.merge(self._tree[0], params)
        x = trunk.embed_tokens(tokens, self.compute_dtype)
        given = trunk.per_layer_inputs(tokens, x) if hasattr(trunk, "per_layer_inputs") else None
        rotations = self._rotations(positions, shared_rotation)
        policy = remat_policy(c, self.remat, tokens.size * row_parts(), self.compute_dtype.itemsize)
        # The first layers have keys and values, which those that have none read.
        borrowers = [i for i, source in enumerate(c.sources) if source != i]
        owners = borrowers[0] if borrowers else c.num_layers
        keeps_caches = keep or owners < c.num_layers
        caches: list[Any] = []

        def loop_of(kind: str, stack: Stack) -> tuple[Any, tuple[Any, PerLayer]]:
            """Return (the function of a loop over layers of a kind, their stacked parameters and what differs)."""
            graph, state = nnx.split(stack_of(trunk.layers, kind))
            rotation = rotation_of(stack.config, rotations)

            def one(x: jax.Array, slice_: tuple[Any, PerLayer]) -> tuple[jax.Array, Any]:
                parameters, own = slice_
                ctx = LayerContext(
                    reader=reader,
                    rotation=rotation(own),
                    window=own.window,
                    given=own.given,
                    routing=None if recorder is None else Routing(recorder.counted, own.routes),
                    source_cache=None if stack.config.source is None else caches[stack.config.source],
                )
                x, aux = nnx.merge(graph, parameters)(x, ctx)
                cache = aux.cache if keeps_caches else None
                load = None if aux.routed is None else aux.routed.load
                return x, (cache, load)

            if policy is not None:
                # Scanned: in unrolled layers, XLA on CPU merges the recomputation with the first computation.
                one = jax.checkpoint(one, policy=policy, prevent_cse=False)
            inputs = None if given is None else given[jnp.asarray(stack.layers)]
            routes = recorder.routes_of(self, stack.layers) if recorder else None
            differs = per_layer(stack.config)._replace(given=inputs, routes=routes)
            return one, (nnx.to_pure_dict(state), differs)

        stacks = {kind: loop_of(kind, stack) for kind, stack in c.stacks.items()}
        # Layers with a state take about three times as long to compile as attention: each is written out once.
        unroll = policy is None and c.num_layers <= UNROLLED_LAYERS and not self.has_states
        computes_all = at is None or bool(c.kinds) or recorder is not None
        if computes_all or not unroll:
            kinds = c.kinds or ("",) * c.num_layers
            x, kept_and_loads = run_layers(kinds[:owners], stacks, x, unroll=unroll)
            if owners < len(kinds):
                caches += [cache for cache, _ in kept_and_loads]
                x, more = run_layers(kinds[owners:], stacks, x, unroll=unroll)
                kept_and_loads += more
            kept, loads = zip(*kept_and_loads, strict=True)
            if recorder:
                recorder.add(self, loads)
            return trunk.norm(x if at is None else take_rows(x, at)), kept
        # The last layer computes keys and values of all tokens, and everything else only for `at`.
        body, layers = stacks[""]
        x, _ = lax.scan(body, x, jax.tree.map(lambda each: each[:-1], layers), unroll=True)
        last, own = jax.tree.map(lambda each: each[-1], layers)
        layer = nnx.merge(nnx.split(trunk.layers)[0], last)
        ctx = LayerContext(
            reader=reader, rotation=rotation_of(c.stacks[""].config, rotations)(own), window=own.window
        )
        return trunk.norm(layer.at(x, ctx, at)), None

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
        return states, Cache(kept, positions)

    def layer_outputs(
        self, params: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
    ) -> Iterator[tuple[str, jax.Array]]:
        """Yield (name, output [rows, time, hidden]) of every part of the model, to find where a fault begins."""
        layers = [f"layer {i} (of 0 to {self.config.num_layers - 1})" for i in range(self.config.num_layers)]
        outputs = self._prefill(self.prepare(params), tokens, positions, visible_until)[0]
        return zip(["its embedding", *layers, "its last norm"], outputs, strict=True)

    def _prefill(
        self, prepared: Params, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array
    ) -> tuple[list[jax.Array], Cache]:
        """Compute what `_run_prepared` returns, and the cache of the tokens."""
        self._check_length(tokens.shape[1])
        rotations = self._rotations(positions, shared_rotation)
        nothing = (None,) * self.config.num_layers
        reader = self._row_reader(positions, visible_until)
        outputs, layers = self._run_prepared(prepared, tokens, rotations, reader, nothing)
        return outputs, Cache(layers, positions)

    def _rotations(self, positions: jax.Array, make: Callable[..., Any]) -> dict[tuple[Rope, int], Any]:
        """Make {(rotary embedding, head_dim): its rotation} of all layers."""
        every = [(rope, each.head_dim) for each, _ in self.config.stacks.values() for rope in each.ropes]
        return {(rope, size): make(rope, size, positions) for rope, size in dict.fromkeys(every)}

    def _run_prepared(
        self,
        prepared: Params,
        tokens: jax.Array,
        rotations: Mapping[tuple[Rope, int], Any],
        reader: Reader,
        caches: Sequence[Any],
    ) -> tuple[list[jax.Array], tuple[Any, ...]]:
        """Run tokens, int32 [B, T], through the layers: (the outputs, [B, T, D], of the embedding, of every layer and
        of the last norm; each layer's cache with them). Also for prefill, where caches are None.

        prepared: from `prepare`. rotations: from `_rotations`. caches: of the tokens before these, by layer.
        """
        c = self.config
        recorder = recorder_of(self)
        fused = any(map(is_joined, prepared["layers"]))
        around, blocks = _parts(c, fused, self._is_apart(prepared), unmerged(self), plain(self.quantized))
        parts = {name: nnx.merge(graph, prepared[name]) for name, graph in around.items()}
        outputs = [parts["embed_tokens"](tokens, self.compute_dtype)]
        given = parts["per_layer_inputs"](tokens, outputs[0]) if "per_layer_inputs" in parts else None
        after: list[Any] = []
        for i, parameters in enumerate(prepared["layers"]):
            kind, n = c.at(i)
            own = c.stacks[kind].config
            rope = own.ropes[own.layer_ropes[n] if own.layer_ropes else 0]
            ctx = LayerContext(
                reader=reader,
                rotation=rotations[rope, own.head_dim],
                window=own.windows[n],
                given=None if given is None else given[i],
                routing=None if recorder is None else Routing(recorder.counted, None),
                cache=caches[i],
                source_cache=None if own.source is None else after[own.source],
                source_layer=c.sources[i],
            )
            x, aux = nnx.merge(blocks[kind], parameters)(outputs[-1], ctx)
            outputs.append(x)
            after.append(aux.cache)
            if recorder and aux.routed:
                recorder.chosen.append(aux.routed.chosen)
        return [*outputs, parts["norm"](outputs[-1])], tuple(after)

    def _is_apart(self, prepared: Params) -> bool:
        """Tell whether mixers with a state have the parts of their parameters apart."""
        for i, layer in enumerate(prepared["layers"]):
            kind = layer_of(self.config.stacks[self.config.at(i)[0]].config)
            if issubclass(kind.mixer, Recurrent) and kind.mixer.is_apart(layer[kind.name]):
                return True
        return False

    def cache_parts(self, length: int) -> tuple[int, ...]:
        return cache_parts(length)

    def ring(self, cache: Cache, length: int, slot: jax.Array | int) -> Cache:
        self._check_length(length)

        def rolled(x: jax.Array, axis: int) -> jax.Array:
            padding = [(0, 0)] * x.ndim
            padding[axis] = (length - x.shape[axis], 0)
            return jnp.roll(jnp.pad(x, padding), slot, axis)

        layers = list(cache.layers)
        for i in range(self.config.num_layers):
            if not self._has_state(i) and self.config.sources[i] == i:
                keys, values = layers[i]
                layers[i] = rolled(keys, 3), rolled(values, 2)
        return Cache(tuple(layers), rolled(cache.positions, 1))

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state in place of keys and values."""
        return any(map(self._has_state, range(self.config.num_layers)))

    def _has_state(self, layer: int) -> bool:
        """Tell whether a layer keeps a state in place of keys and values."""
        return has_state(self.config.stacks[self.config.at(layer)[0]].config)

    def decode(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        slot: jax.Array | int,
    ) -> tuple[jax.Array, Cache]:
        entries = written(cache.positions, positions[:, None], slot, 1)
        reader = TokenReader(positions=positions[:, None], slot=slot, entries=entries, visible=visible)
        states, cache = self._run_cached(params, cache, tokens[:, None], reader)
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
        self._check_length(used.shape[1] + cache.positions.shape[1])
        reader = GroupReader(
            positions=positions[:, None],
            slot=step,
            entries=written(cache.positions, positions[:, None], step, 1),
            prompts=prompts.layers,
            used=used,
            prompt_positions=prompts.positions,
        )
        states, cache = self._run_cached(params, cache, tokens[:, None], reader)
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
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        reader = ChunkReader(
            positions=positions,
            slot=start,
            entries=written(cache.positions, positions, start, 1),
            count=jnp.full_like(start, tokens.shape[1]) if count is None else count,
        )
        return self._run_cached(params, cache, tokens, reader)

    def _run_cached(
        self, params: Params, cache: Cache, tokens: jax.Array, reader: CacheReader
    ) -> tuple[jax.Array, Cache]:
        """Compute tokens, int32 [B, T], that follow those of a cache: (hidden states [B, T, D], cache with them)."""
        prepared = params if isinstance(params["layers"], tuple) else self.prepare(params)
        rotations = self._rotations(reader.positions, rotation)
        outputs, layers = self._run_prepared(prepared, tokens, rotations, reader, cache.layers)
        return outputs[-1], Cache(layers, reader.entries)

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
    pattern = loops[before : before + period]
    take = _taker({kind: stack for kind, (_, stack) in stacks.items()})
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


def rotation_of(
    config: DecoderConfig, rotations: Mapping[tuple[Rope, int], Any]
) -> Callable[[PerLayer], tuple[jax.Array, ...]]:
    """Make the function that finds a layer's rotation among those of `Decoder._rotations`."""
    own = [rotations[rope, config.head_dim] for rope in config.ropes]
    if len(own) == 1:
        return lambda layer: own[0]
    several = jax.tree.map(lambda *each: jnp.stack(each), *own)
    return lambda layer: jax.tree.map(lambda each: each[layer.rope], several)
