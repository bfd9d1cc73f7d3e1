"""What a model is without its arrays."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core.contracts import AttentionOver, ModelFamily
from rlhf_core.errors import InputError
from rlhf_core.mesh import AnyMesh, param_shardings
from rlhf_core.models.config import Head, Remat
from rlhf_core.models.lora import Lora
from rlhf_core.models.params import join, paths, split

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True)
class Definition:
    """What a model is without its arrays: static under jit. See `ModelFamily` for what its functions do."""

    family: ModelFamily
    config: Any
    head: Head

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def lora(self) -> Lora | None:
        """The model's adapters; None: it has none."""
        return getattr(self.config, "lora", None)

    def with_lora(self, lora: Lora | None) -> Definition:
        """With these adapters, or without any. Raises InputError where the family takes none."""
        if self.family.adapt is None:
            raise InputError(f"lora: models of {', '.join(self.family.name)} take no adapters")
        return dataclasses.replace(self, config=self.family.adapt(self.config, lora))

    def abstract_params(self) -> dict[str, Any]:
        """Nested dict of jax.ShapeDtypeStruct, float32."""
        return self.family.abstract(self.config)

    def logical_axes(self) -> dict[str, Any]:
        """The same dict with a tuple of logical axis names at every leaf."""
        return self.family.axes(self.config)

    def shardings(self, mesh: AnyMesh) -> dict[str, Any]:
        """The same dict of NamedSharding."""
        return param_shardings(mesh, self.logical_axes(), self.abstract_params())

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Fresh parameters, float32."""
        return self.family.init(self.config, key)

    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array:
        """[rows, time, hidden] after the last norm, in the compute dtype, of int32 [rows, time]."""
        return self.family.hidden(self.config, params, tokens, positions, visible_until)

    def hidden_at(
        self, params: Any, tokens: Any, positions: Any, visible_until: Any, at: jax.Array
    ) -> jax.Array:
        """`hidden` at the indices `at`, int32 [rows, n]: [rows, n, hidden]."""
        if self.family.hidden_at is not None:
            return self.family.hidden_at(self.config, params, tokens, positions, visible_until, at)
        hidden = self.hidden(params, tokens, positions, visible_until)
        return jnp.take_along_axis(hidden, at[:, :, None], axis=1)

    def unembedding(self, params: Any) -> tuple[jax.Array, float | None]:
        """(kernel [hidden, vocab], soft cap or None)."""
        return self.family.unembedding(self.config, params)

    def score(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Rewards float32 [...] of hidden states [..., hidden]."""
        return self.family.score(self.config, params, hidden)

    def prefill(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> tuple[jax.Array, Any]:
        """(hidden states as `hidden`, the cache of these tokens)."""
        return self.family.prefill(self.config, params, tokens, positions, visible_until)

    def ring(self, cache: Any, length: int, slot: Any) -> Any:
        """The cache as one of `length` slots, its last token in slot - 1, those before it going back, round."""
        return self.family.ring(self.config, cache, length, slot)

    def prepare(self, params: Any) -> Any:
        """The parameters as `decode` reads them fastest."""
        return self.family.prepare(self.config, params)

    def decode(
        self, params: Any, cache: Any, tokens: Any, positions: Any, visible: Any, slot: Any
    ) -> tuple[jax.Array, Any]:
        """One token a row, written at `slot`: (hidden [B, hidden], cache)."""
        return self.family.decode(self.config, params, cache, tokens, positions, visible, slot)


def define(
    family: ModelFamily,
    hf_config: Mapping[str, Any],
    head: Head,
    *,
    dtype: str | None = None,
    remat: Remat = "auto",
    attention: AttentionOver | None = None,
) -> Definition:
    """What a config.json describes. dtype, remat, attention: of the computation, see `DecoderConfig`; None and "auto"
    are what a family does by itself.

    Raises InputError for a config that the family cannot honour, and where it takes no such option.
    """
    asked = {"dtype": dtype, "remat": remat, "attention": attention}
    options: dict[str, Any] = {name: value for name, value in asked.items() if value not in (None, "auto")}
    try:
        inspect.signature(family.parse).bind(hf_config, head, **options)
    except TypeError:
        raise InputError(
            f"{' and '.join(options)}: models of {', '.join(family.name)} decide for themselves; leave it out"
        ) from None
    return Definition(family, family.parse(hf_config, head, **options), head)


def complete(definition: Definition, params: Mapping[str, Any], mesh: Mesh, seed: int) -> dict[str, Any]:
    """`params` for `definition`: without the leaves it has no place for; those it lacks are drawn from `seed`."""
    shardings = definition.shardings(mesh)
    there = {path for path, _ in paths(params)}
    kept = split(params, frozenset(there - {path for path, _ in paths(shardings)}))[0]
    missing = split(shardings, frozenset(there))[0]
    if not missing:
        return kept

    def draw(key: jax.Array) -> dict[str, Any]:
        return split(definition.init(key), frozenset(there))[0]

    return join(kept, jax.jit(draw, out_shardings=missing)(jax.random.key(seed)))
