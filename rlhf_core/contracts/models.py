"""What a family of language models is made of: pure functions over a nested dict of parameters.

`config` is whatever hashable value `ParseConfig` returned, static under jit; `params` the dict that `InitParams` or
`LoadParams` made; `cache` any tree of arrays. Tokens, positions and visible_until are int32 [rows, time], as in `Rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import jax

Head = Literal["lm", "score"]


@dataclass(frozen=True)
class Lora:
    """y = x · kernel + scale · (dropout(x) · A) · B, with A [in, rank] and B [rank, out]; B starts at zero.

    scale: alpha / rank, or alpha / sqrt(rank) with use_rslora (Kalajdzievski 2023). dropout: the probability that an
    element of x is zero on its way into A, while training.
    targets: dotted paths of the adapted modules within a layer, such as "self_attn.q_proj".
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class ParseConfig(Protocol):
    """Read a config.json into a config, which has `vocab_size` and `hidden_size`.

    A family that lets its caller choose has the keyword parameters `dtype`, `remat` and `attention`, too, see
    `rlhf_core.models.DecoderConfig`.
    Raises InputError naming each field that the family cannot honour.
    """

    def __call__(self, hf_config: Mapping[str, Any], head: Head, /) -> Any: ...


class AbstractParams(Protocol):
    """Return the parameters' shapes: jax.ShapeDtypeStruct, float32."""

    def __call__(self, config: Any, /) -> dict[str, Any]: ...


class ParamAxes(Protocol):
    """Return the parameters' logical axes: a tuple per parameter, a name or None per dimension."""

    def __call__(self, config: Any, /) -> dict[str, Any]: ...


class InitParams(Protocol):
    """Draw fresh parameters, float32."""

    def __call__(self, config: Any, key: jax.Array, /) -> dict[str, Any]: ...


class HiddenStates(Protocol):
    """Compute the hidden states after the last norm: [rows, time, hidden], compute dtype."""

    def __call__(
        self, config: Any, params: Any, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array, /
    ) -> jax.Array: ...


class HiddenStatesAt(Protocol):
    """Compute the hidden states at the indices `at`, int32 [rows, n]: [rows, n, hidden]."""

    def __call__(
        self,
        config: Any,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        visible_until: jax.Array,
        at: jax.Array,
        /,
    ) -> jax.Array: ...


class Unembedding(Protocol):
    """Return the kernel from hidden states to logits, [hidden, vocab], and the logits' soft cap, if any."""

    def __call__(self, config: Any, params: Any, /) -> tuple[jax.Array, float | None]: ...


class RewardHead(Protocol):
    """Compute the rewards, float32 [...], of hidden states [..., hidden]."""

    def __call__(self, config: Any, params: Any, hidden: jax.Array, /) -> jax.Array: ...


class Prefill(Protocol):
    """Compute the hidden states and the key/value cache of these tokens, rows first."""

    def __call__(
        self, config: Any, params: Any, tokens: jax.Array, positions: jax.Array, visible_until: jax.Array, /
    ) -> tuple[jax.Array, Any]: ...


class RingCache(Protocol):
    """Turn a cache into a ring of `length` slots: the last token in slot - 1, those before it in the slots before."""

    def __call__(self, config: Any, cache: Any, length: int, slot: jax.Array | int, /) -> Any: ...


class PrepareParams(Protocol):
    """Return the parameters as `Decode` reads them fastest, adapters merged. Called once per rollout, inside jit."""

    def __call__(self, config: Any, params: Any, /) -> Any: ...


class Decode(Protocol):
    """Decode one token per row: (hidden states [B, hidden], cache with the token's keys and values in `slot`).

    tokens, positions: int32 [B]. visible: bool [B, length], the slots that a row's token sees, its own included.
    """

    def __call__(
        self,
        config: Any,
        params: Any,
        cache: Any,
        tokens: jax.Array,
        positions: jax.Array,
        visible: jax.Array,
        slot: jax.Array | int,
        /,
    ) -> tuple[jax.Array, Any]: ...


class DecodeGroups(Protocol):
    """Do what `Decode` does for rows whose prompts have one cache each: B = P · G rows, row b continues prompt b // G.

    prompts: the cache that `Prefill` made of P rows of `time` tokens; used: bool [P, time], those that are not padding.
    cache: of the rows' own tokens, with the shapes of `RingCache`. The token is written to its entry `step`, and sees
    its prompt's used tokens and the entries up to `step`.
    """

    def __call__(
        self,
        config: Any,
        params: Any,
        prompts: Any,
        used: jax.Array,
        cache: Any,
        tokens: jax.Array,
        positions: jax.Array,
        step: jax.Array | int,
        /,
    ) -> tuple[jax.Array, Any]: ...


class Extend(Protocol):
    """Continue each row's cached tokens by `time` more: (hidden states [B, time, hidden], cache with them).

    cache: with the shapes of `RingCache`, its entry p the token at position p. tokens: int32 [B, time], at positions
    start … start + time - 1, which are entries of the cache; start: int32 [B]. A token sees the entries up to its own.
    What lies behind a row's last token is overwritten before it is seen, so that the last of `tokens` may be padding.

    The `decode` of a family with this function takes `slot`, int32 [B], of each row, too, and like `unembedding` the
    parameters that `prepare` returned.
    """

    def __call__(
        self, config: Any, params: Any, cache: Any, tokens: jax.Array, start: jax.Array, /
    ) -> tuple[jax.Array, Any]: ...


class LoadParams(Protocol):
    """Read the parameters from a Hugging Face directory, float32, sharded so; leave out a missing score head."""

    def __call__(self, config: Any, directory: Path, shardings: Any, /) -> dict[str, Any]: ...


class SaveParams(Protocol):
    """Write the weights, and nothing else, under the family's Hugging Face names.

    dtype: "float32", "float16" or "bfloat16".
    """

    def __call__(self, config: Any, params: Any, directory: Path, dtype: str, /) -> None: ...


class AdaptConfig(Protocol):
    """Return the config with low-rank adapters, or without any.

    An adapter is {"adapter": {"lora_a", "lora_b"}} beside the kernel [layers, in, out] of each of `lora.targets`.
    """

    def __call__(self, config: Any, lora: Lora | None, /) -> Any: ...


@dataclass(frozen=True)
class TensorParallel:
    """How a family samples with every layer shared by the devices along the mesh axis `tensor`.

    Within `jax.shard_map` the family's `prefill`, `decode`, `extend` and `unembedding` then get each device's part of
    the parameters, and sum over the axis where a layer needs it (`rlhf_core.mesh.sum_over_tensor`). The tokens,
    positions and hidden states are the same on all devices of the axis.
    divides: (config) → the number that the axis' size must divide; 1: no layer can be shared.
    prepare: as `PrepareParams`, in a layout whose parts are those of the devices. axes: the logical axes of its result.
    """

    divides: Callable[[Any], int]
    prepare: PrepareParams
    axes: ParamAxes


@dataclass(frozen=True)
class ModelFamily:
    """A family of language models, as pure functions over a nested dict of parameters.

    name: the `model_type` values of config.json that it reads, such as ("llama", "qwen2").
    parse, abstract, axes, init: from a config.json to fresh parameters.
    hidden, unembedding, score: the forward pass, and the heads "lm" and "score".
    prefill, ring, prepare, decode: the parts of a sampler.
    load, save: the files of a Hugging Face directory.
    adapt: None where the family takes no adapters. hidden_at: None where `hidden` is as fast. tensor_parallel: None
    where sampling uses the shardings of training, whose compiler may then send weights for every token.
    decode_groups: None where every completion has a copy of its prompt's cache.
    extend: None where every turn of a conversation is prefilled again, from its first token on.
    """

    name: tuple[str, ...]
    parse: ParseConfig
    abstract: AbstractParams
    axes: ParamAxes
    init: InitParams
    hidden: HiddenStates
    unembedding: Unembedding
    score: RewardHead
    prefill: Prefill
    ring: RingCache
    prepare: PrepareParams
    decode: Decode
    load: LoadParams
    save: SaveParams
    adapt: AdaptConfig | None = None
    hidden_at: HiddenStatesAt | None = None
    tensor_parallel: TensorParallel | None = None
    decode_groups: DecodeGroups | None = None
    extend: Extend | None = None


class ModelDefinition(Protocol):
    """A model without its parameters, hashable: its family's functions, given its config."""

    @property
    def family(self) -> ModelFamily: ...
    @property
    def config(self) -> Any: ...
    def __hash__(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def absent(self) -> tuple[tuple[int, int], ...]: ...
    def as_policy(self, tokenizer: Any) -> Any: ...
    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array: ...
    def unembedding(self, params: Any) -> tuple[jax.Array, float | None]: ...
    def prefill(
        self, params: Any, tokens: Any, positions: Any, visible_until: Any
    ) -> tuple[jax.Array, Any]: ...
    def ring(self, cache: Any, length: int, slot: Any) -> Any: ...
    def prepare(self, params: Any) -> Any: ...
    def decode(
        self, params: Any, cache: Any, tokens: Any, positions: Any, visible: Any, slot: Any
    ) -> tuple[jax.Array, Any]: ...
    def decode_groups(
        self, params: Any, prompts: Any, used: Any, cache: Any, tokens: Any, positions: Any, step: Any
    ) -> tuple[jax.Array, Any]: ...
    def extend(self, params: Any, cache: Any, tokens: Any, start: Any) -> tuple[jax.Array, Any]: ...
