"""The decoder's architecture, one hashable value. Families differ in these fields only."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Remat = Literal["auto", "none", "dots", "full"]
Norms = Literal["before", "after", "both"]
QKNorm = Literal["head", "projection"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional", "none"]


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. The factors are unitless; lengths are in positions.

    kind: "default"; "linear": positions divided by `factor`; "llama3": low frequencies divided by `factor`, high ones
        kept, blended in between (Llama 3.1); "yarn": the same with bounds in turns, `beta_slow` to `beta_fast` (Peng
        et al. 2023); "longrope": each frequency divided by its `divisors`, for rows of at most `original_length`
        (Ding et al. 2024); "proportional": the first and the middle `share` / 2 of a head's dimensions, with the
        wavelengths that they have where all are rotated, divided by `factor` (Gemma 4); "none": no rotation.
    theta: base of the wavelengths. magnitude: factor of the rotated queries and keys. share: fraction of a head's
        dimensions, the first ones, that are rotated.
    truncate: round yarn's bounds to whole dimensions.
    growth: queries at position p are multiplied by 1 + growth · ln(1 + ⌊p / original_length⌋), unitless (Llama 4).
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    divisors: tuple[float, ...] = ()
    share: float = 1.0
    growth: float = 0.0


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one decoder; what is off costs nothing.

    intermediate_size: of the gated MLP, or of one expert. query_scale: attention logits are query_scale · q · k;
        None: head_dim^-0.5.
    norms: where a layer normalises: "before" attention and MLP, "after" them, or "both". norm_offset: added to
        every norm's weight. qk_norm: normalise queries and keys by head, or over all heads; None: neither.
    fused: queries, keys and values are one projection, gate and up another.
    embedding_scale, residual_scale, logit_scale: factors of the embeddings, of what each attention and MLP adds, and of
        the logits. attention_softcap, logit_softcap: cap · tanh(x / cap).
    windows: per layer, how many positions back a query sees; None: all of them.
    ropes, layer_ropes: the rotary embeddings, and the index of each layer's among them; empty: the first for all.
    experts: MLPs per layer; `experts_per_token` of them compute a token; 0: one plain MLP. They are weighted by the
        router's probabilities, divided by their sum plus `normalise_floor` with `normalise_experts`, times
        `expert_scale`.
    router: probabilities are a softmax over all experts, a softmax over the chosen ones ("chosen"), or sigmoids, with a
        correction that is not trained and counts for the choice alone.
    expert_groups: (groups of experts, groups that a token's experts may come from).
    layer: the class of the layers, see `layer`; None: `layer.Layer`. settings: what a family's own class has to know
        beyond what is here; hashable.
    source: the number of the layer whose keys and values these read; None: each has its own.
    apart: mixers with a state keep the parts of their parameters apart, as devices share them, see `Recurrent.apart`.
    attention_gate: attention's output is multiplied by a sigmoid that the query's projection computes, too.
    sinks: each head's softmax has one more logit, a parameter, for nothing to attend to (gpt-oss).
    swiglu: (slope, limit) of experts with biases, (up + 1) · gate · sigmoid(slope · gate) of clamped values, where gate
        and up are one projection, in turn (gpt-oss). None: activation(gate) · up.
    shared_size: intermediate size of an MLP that computes every token beside its experts; 0: there is none.
        shared_gate: whether its output is multiplied by a sigmoid of its own.
    placeholders: tokens that stand for images and sounds, after the one that is embedded in their place (Gemma 4).
    weight_names: (parameter path, name in the files) of the weights with unusual names; see `weights`.
    fused_experts: in the files, the experts of a layer are two tensors, gate_up_proj [experts, 2 · size, hidden] and
        down_proj [experts, hidden, size].
    prefix: how the names of the tensors begin in files that hold more than this text model, where others begin with
        "model."; empty for files that hold nothing else.
    carried: regular expressions of the names of tensors that are kept in the files and not read.
    kinds: the name of each layer's kind, where layers have different parameters; empty: they are all alike.
    variants: (kind, its fields and their values) of the kinds whose fields differ from these.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    activation: str = "silu"
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    query_scale: float | None = None
    norms: Norms = "before"
    norm_offset: float = 0.0
    fused: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = ()
    ropes: tuple[Rope, ...] = (Rope(),)
    layer_ropes: tuple[int, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = True
    router: Literal["softmax", "chosen", "sigmoid"] = "softmax"
    expert_groups: tuple[int, int] = (1, 1)
    expert_scale: float = 1.0
    normalise_floor: float = 0.0
    layer: Any = None
    settings: Any = None
    source: int | None = None
    apart: bool = False
    attention_gate: bool = False
    sinks: bool = False
    swiglu: tuple[float, float] | None = None
    shared_size: int = 0
    shared_gate: bool = False
    placeholders: tuple[int, ...] = ()
    weight_names: tuple[tuple[str, str], ...] = ()
    fused_experts: bool = False
    prefix: str = ""
    carried: tuple[str, ...] = ()
    initializer_range: float = 0.02
    kinds: tuple[str, ...] = ()
    variants: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    @functools.cached_property
    def stacks(self) -> Mapping[str, Stack]:
        """{kind: the layers of this kind, whose parameters are stacked}; "" where all layers are alike."""
        if not self.kinds:
            return {"": Stack(self, tuple(range(self.num_layers)))}
        stacks = {}
        for kind in dict.fromkeys(self.kinds):
            layers = tuple(i for i, other in enumerate(self.kinds) if other == kind)
            windows = tuple(self.windows[i] for i in layers) if self.windows else ()
            ropes = tuple(self.layer_ropes[i] for i in layers) if self.layer_ropes else ()
            used = tuple(dict.fromkeys(ropes)) or (0,)  # of the ropes, those of this kind
            config = replace(
                self,
                num_layers=len(layers),
                windows=windows,
                ropes=tuple(self.ropes[i] for i in used),
                layer_ropes=tuple(used.index(i) for i in ropes) if len(used) > 1 else (),
                kinds=(),
                variants=(),
                **dict(dict(self.variants).get(kind, ())),
            )
            stacks[kind] = Stack(config, layers)
        return stacks

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """The number of the layer whose keys and values each layer attends to: mostly its own."""
        found = [self.stacks[kind].config.source for kind in self.kinds or ("",) * self.num_layers]
        return tuple(i if source is None else source for i, source in enumerate(found))

    def at(self, layer: int) -> tuple[str, int]:
        """Return the kind of a layer, and its index among the layers of its kind."""
        kind = self.kinds[layer] if self.kinds else ""
        return kind, self.stacks[kind].layers.index(layer)


class Stack(NamedTuple):
    """Layers of one kind: a configuration of these layers alone, and their numbers in the model."""

    config: DecoderConfig
    layers: tuple[int, ...]


def layer_loops(kinds: Sequence[str]) -> list[tuple[str, int]]:
    """Group layers: the kind of those that follow each other, and how many they are."""
    return [(kind, len(list(layers))) for kind, layers in itertools.groupby(kinds)]


def repetition(loops: Sequence[Any]) -> tuple[int, int, int]:
    """Split a sequence into (how many come before, the period, how many times it repeats); the others come after.

    The split leaves the fewest to write out: those before, one period, and those after.
    """
    best = (len(loops), 0, 0)
    fewest = len(loops)
    for before in range(len(loops)):
        for period in range(1, (len(loops) - before) // 2 + 1):
            repeats = 1
            while loops[before : before + period] == loops[before + repeats * period :][:period]:
                repeats += 1
            written = len(loops) - (repeats - 1) * period
            if written < fewest:
                best, fewest = (before, period, repeats), written
    return best


class PerLayer(NamedTuple):
    """How the layers of a loop differ beside their parameters; a field is None where they do not."""

    window: jax.Array | None
    """int32 [layers]; the largest integer for a layer that sees everything."""
    rope: jax.Array | None
    """int32 [layers], indices of the config's ropes."""
    given: jax.Array | None = None
    """[layers, B, T, size], each layer's own input."""
    routes: jax.Array | None = None
    """int8 or int16 [layers, B, T, k], the experts of each layer's tokens; -1 where the router chooses."""


def per_layer(config: DecoderConfig) -> PerLayer:
    """Return the windows and rotary embeddings of the layers, for a loop over them."""
    windows = [window or jnp.iinfo(jnp.int32).max for window in config.windows]
    return PerLayer(
        jnp.asarray(windows, jnp.int32) if any(config.windows) else None,
        jnp.asarray(config.layer_ropes, jnp.int32) if config.layer_ropes else None,
    )


REMAT_ABOVE = 2 << 30
"""Bytes of saved activations above which remat "auto" recomputes."""


def remat_policy(config: DecoderConfig, name: Remat, tokens: int, itemsize: int) -> Callable[..., Any] | None:
    """Choose what a layer keeps for the backward pass over `tokens` tokens, `itemsize` bytes per number; None: all.

    name: `Decoder.remat`.
    """
    if name == "auto":
        widths = (
            8 * config.hidden_size
            + 4 * config.num_heads * config.head_dim
            + 4 * config.intermediate_size * max(config.experts_per_token, 1)
        )
        saved = tokens * config.num_layers * widths * itemsize
        name = "dots" if saved > REMAT_ABOVE else "none"
    if name == "none":
        return None
    policies = jax.checkpoint_policies
    return policies.dots_with_no_batch_dims_saveable if name == "dots" else policies.nothing_saveable
