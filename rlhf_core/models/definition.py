"""A model without its arrays."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core.contracts import AttentionOver, ModelFamily
from rlhf_core.errors import InputError
from rlhf_core.mesh import AnyMesh, param_shardings
from rlhf_core.models.config import Head, Remat
from rlhf_core.models.lora import Lora
from rlhf_core.models.params import Path, join, paths, split
from rlhf_core.runtime.caches import Exact
from rlhf_core.tokenizer.encoding import ids_without_token

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class Definition:
    """A model without its arrays, static under jit. See `ModelFamily` for its functions.

    A forward pass goes from here to the family's function (in `decoder`, for core's families), and then to the layers.
    """

    family: ModelFamily
    config: Any
    head: Head
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges (first, one after the last) of ids that are no token of the tokenizer. A policy never samples them, and
    they are left out of the softmax of its log-probabilities; empty for a model that is not sampled from."""

    def as_policy(self, tokenizer: Any) -> Definition:
        """Return the definition of a policy that samples this tokenizer's tokens alone."""
        return dataclasses.replace(self, absent=ids_without_token(tokenizer, self.vocab_size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Definition) and self._exact == other._exact

    def __hash__(self) -> int:
        return hash(self._exact)

    @cached_property
    def _exact(self) -> Exact:
        return Exact(tuple(getattr(self, each.name) for each in dataclasses.fields(self)))

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def lora(self) -> Lora | None:
        """The model's adapters, if any."""
        return getattr(self.config, "lora", None)

    def with_lora(self, lora: Lora | None) -> Definition:
        """Return the definition with these adapters, or without any. Raises InputError where the family takes none."""
        if self.family.adapt is None:
            raise InputError(f"lora: models of {', '.join(self.family.name)} take no adapters")
        return dataclasses.replace(self, config=self.family.adapt(self.config, lora))

    def abstract_params(self) -> dict[str, Any]:
        """Return the parameters' shapes: a nested dict of jax.ShapeDtypeStruct, float32."""
        return self.family.abstract(self.config)

    def logical_axes(self) -> dict[str, Any]:
        """Return the same dict with a tuple of logical axis names per leaf."""
        return self.family.axes(self.config)

    def shardings(self, mesh: AnyMesh) -> dict[str, Any]:
        """Return the same dict with a NamedSharding per leaf."""
        return param_shardings(mesh, self.logical_axes(), self.abstract_params())

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Draw fresh parameters, float32."""
        return self.family.init(self.config, key)

    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array:
        """Compute hidden states [rows, time, hidden] after the last norm, compute dtype, from int32 [rows, time]."""
        return self.family.hidden(self.config, params, tokens, positions, visible_until)

    def hidden_at(
        self, params: Any, tokens: Any, positions: Any, visible_until: Any, at: jax.Array
    ) -> jax.Array:
        """Compute `hidden` at the indices `at`, int32 [rows, n]: [rows, n, hidden]."""
        if self.family.hidden_at is not None:
            return self.family.hidden_at(self.config, params, tokens, positions, visible_until, at)
        hidden = self.hidden(params, tokens, positions, visible_until)
        return jnp.take_along_axis(hidden, at[:, :, None], axis=1)

    def padded_hidden(self, params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Compute `hidden` of a padded batch, int32 [B, T], padding on either side: [B, T, hidden]."""
        attended = attention_mask != 0
        positions = jnp.maximum(jnp.cumsum(attended, axis=1, dtype=jnp.int32) - 1, 0)
        visible_until = jnp.where(attended, attention_mask.shape[1], 0).astype(jnp.int32)
        return self.hidden(params, input_ids, positions, visible_until)

    def padded_scores(self, params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Compute rewards, float32 [B], of a padded batch at each row's last attended token."""
        hidden = self.padded_hidden(params, input_ids, attention_mask)
        last = attention_mask.shape[1] - 1 - jnp.argmax(attention_mask[:, ::-1] != 0, axis=1)
        return self.score(params, jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])

    def unembedding(self, params: Any) -> tuple[jax.Array, float | None]:
        """Return (kernel [hidden, vocab], soft cap or None)."""
        return self.family.unembedding(self.config, params)

    def score(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Compute rewards, float32 [...], of hidden states [..., hidden]."""
        return self.family.score(self.config, params, hidden)

    def prefill(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> tuple[jax.Array, Any]:
        """Compute (hidden states as `hidden`, the cache of these tokens)."""
        return self.family.prefill(self.config, params, tokens, positions, visible_until)

    def ring(self, cache: Any, length: int, slot: Any) -> Any:
        """Turn a cache into a ring of `length` slots: the last token in slot - 1, earlier ones in the slots before."""
        return self.family.ring(self.config, cache, length, slot)

    def prepare(self, params: Any) -> Any:
        """Lay the parameters out as `decode` reads them fastest."""
        return self.family.prepare(self.config, params)

    def decode(
        self, params: Any, cache: Any, tokens: Any, positions: Any, visible: Any, slot: Any
    ) -> tuple[jax.Array, Any]:
        """Decode one token per row, written at `slot`, int32 scalar or [B]: (hidden [B, hidden], cache)."""
        return self.family.decode(self.config, params, cache, tokens, positions, visible, slot)

    def decode_groups(
        self, params: Any, prompts: Any, used: Any, cache: Any, tokens: Any, positions: Any, step: Any
    ) -> tuple[jax.Array, Any]:
        """Do what `decode` does for rows whose prompts have one cache each, see `DecodeGroups`."""
        assert self.family.decode_groups is not None
        return self.family.decode_groups(self.config, params, prompts, used, cache, tokens, positions, step)

    def extend(self, params: Any, cache: Any, tokens: Any, start: Any) -> tuple[jax.Array, Any]:
        """Continue each row's cached tokens by several: (hidden [B, T, hidden], cache), see `Extend`."""
        assert self.family.extend is not None
        return self.family.extend(self.config, params, cache, tokens, start)


def define(
    family: ModelFamily,
    hf_config: Mapping[str, Any],
    head: Head,
    *,
    dtype: str | None = None,
    remat: Remat = "auto",
    attention: AttentionOver | None = None,
) -> Definition:
    """Define the model that a config.json describes. dtype, remat, attention: see `DecoderConfig`; None and "auto": the
    family's defaults.

    Raises InputError for a config that the family cannot honour, and for options that it does not take.
    """
    choices = {"dtype": dtype, "remat": remat, "attention": attention}
    options: dict[str, Any] = {name: value for name, value in choices.items() if value not in (None, "auto")}
    try:
        inspect.signature(family.parse).bind(hf_config, head, **options)
    except TypeError:
        raise InputError(
            f"{' and '.join(options)}: models of {', '.join(family.name)} decide for themselves; leave it out"
        ) from None
    return Definition(family, family.parse(hf_config, head, **options), head)


def complete(definition: Definition, params: Mapping[str, Any], mesh: Mesh, seed: int) -> dict[str, Any]:
    """Make `params` those of `definition`: drop leaves that it does not have, and draw missing ones from `seed`."""
    shardings = definition.shardings(mesh)
    present = {path for path, _ in paths(params)}
    kept = split(params, frozenset(present - {path for path, _ in paths(shardings)}))[0]
    missing = split(shardings, frozenset(present))[0]
    if not missing:
        return kept

    draw = partial(_draw, definition, frozenset(present))
    return join(kept, jax.jit(draw, out_shardings=missing)(jax.random.key(seed)))


def _draw(definition: Definition, present: frozenset[Path], key: jax.Array) -> dict[str, Any]:
    """Draw the parameters of a definition that are not at the paths `present`."""
    return split(definition.init(key), present)[0]
