"""A language model without its arrays: the functions that every family implements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path as Directory
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

from rlhf_core.contracts import AttentionOver, TensorParallel
from rlhf_core.contracts.models import Head
from rlhf_core.errors import InputError
from rlhf_core.mesh import AnyMesh, param_shardings
from rlhf_core.models.attention import capped
from rlhf_core.models.lora import Lora, linear_modules
from rlhf_core.models.params import Path, join, paths, split
from rlhf_core.models.quantized import Quantization
from rlhf_core.runtime.caches import Exact
from rlhf_core.tokenizer.encoding import ids_without_token

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True, eq=False, kw_only=True)
class Definition:
    """A language model without its arrays, static under jit: pure functions over a nested dict of parameters.

    A family subclasses it with a frozen dataclass (`eq=False`) whose fields are hashable. It has the fields or
    properties `vocab_size` and `hidden_size`, the size of hidden states, and implements the methods that raise
    NotImplementedError here; the methods in `OPTIONAL` make a model faster or give it adapters. With the fields
    `dtype`, `remat` and `attention`, callers choose how it computes. `rlhf_core.models.Decoder` has all of it.

    Tokens, positions and visible_until are int32 [rows, time], as in `rlhf_core.contracts.Rows`; a cache is any tree of
    arrays, rows first. An array of a cache has an entry for each token, or is a state: what all tokens so far have
    become, of a size that does not depend on their number, so that `ring` leaves it alone.
    """

    head: Head = "lm"
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges (first, one after the last) of ids that are no token of the tokenizer. A policy never samples them, and
    they are left out of the softmax of its log-probabilities; empty for a model that is not sampled from."""

    if TYPE_CHECKING:  # not at run time, so that they may be fields

        @property
        def vocab_size(self) -> int: ...
        @property
        def hidden_size(self) -> int: ...

    @property
    def lora(self) -> Lora | None:
        """The model's adapters, if any; a field of models that take adapters."""
        return None

    def abstract_params(self) -> dict[str, Any]:
        """Return the parameters' shapes: a nested dict of jax.ShapeDtypeStruct, float32."""
        raise NotImplementedError

    def logical_axes(self) -> dict[str, Any]:
        """Return the parameters' logical axes: a tuple per parameter, a name or None per dimension."""
        raise NotImplementedError

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Draw fresh parameters, float32."""
        raise NotImplementedError

    def load(self, directory: Directory, shardings: Any) -> dict[str, Any]:
        """Read the parameters from a Hugging Face directory, float32, sharded so; leave out a missing score head."""
        raise NotImplementedError

    def save(self, params: Any, directory: Directory, dtype: str) -> None:
        """Write the weights, and nothing else, under the family's Hugging Face names.

        dtype: "float32", "float16" or "bfloat16".
        """
        raise NotImplementedError

    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array:
        """Compute the hidden states after the last norm: [rows, time, hidden], compute dtype."""
        raise NotImplementedError

    def unembedding(self, params: Any) -> tuple[jax.Array | None, float | None]:
        """Return the kernel from hidden states to logits, [hidden, vocab], and the logits' soft cap, if any.

        The kernel is None where hidden states are logits already.
        """
        raise NotImplementedError

    def score(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Compute the rewards, float32 [...], of hidden states [..., hidden]."""
        raise NotImplementedError

    def prefill(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> tuple[jax.Array, Any]:
        """Compute (hidden states as `hidden`, the key/value cache of these tokens). params: plain or from `prepare`."""
        raise NotImplementedError

    def ring(self, cache: Any, length: int, slot: Any) -> Any:
        """Turn a cache into a ring of `length` slots: the last token in slot - 1, earlier ones in the slots before."""
        raise NotImplementedError

    def prepare(self, params: Any) -> Any:
        """Lay the parameters out as `decode` reads them fastest, adapters merged; called once per rollout, in jit."""
        raise NotImplementedError

    def decode(
        self, params: Any, cache: Any, tokens: Any, positions: Any, visible: Any, slot: Any
    ) -> tuple[jax.Array, Any]:
        """Decode one token per row: (hidden states [B, hidden], cache with the token's keys and values in `slot`).

        tokens, positions: int32 [B]. visible: bool [B, length], the slots that a row's token sees, its own included.
        slot: int32 scalar; of a model with `extend` also int32 [B].
        """
        raise NotImplementedError

    def cache_parts(self, length: int) -> tuple[int, ...]:
        """Choose the sizes, `length` in all, of the parts that `decode` wants a cache cut into along time where tokens
        are in the entries of their positions: a tuple of arrays for each array with entries. One: no cut.
        """
        return (length,)

    OPTIONAL = ("hidden_at", "decode_groups", "extend", "with_lora")
    """Methods that a family may leave out, see `has`."""

    def has(self, method: str) -> bool:
        """Tell whether the model implements one of the methods `OPTIONAL`."""
        return getattr(type(self), method) is not getattr(Definition, method)

    def hidden_at(
        self, params: Any, tokens: Any, positions: Any, visible_until: Any, at: jax.Array
    ) -> jax.Array:
        """Compute `hidden` at the indices `at`, int32 [rows, n]: [rows, n, hidden]."""
        hidden = self.hidden(params, tokens, positions, visible_until)
        return jnp.take_along_axis(hidden, at[:, :, None], axis=1)

    def decode_groups(
        self, params: Any, prompts: Any, used: Any, cache: Any, tokens: Any, positions: Any, step: Any
    ) -> tuple[jax.Array, Any]:
        """Do what `decode` does for rows whose prompts have one cache each: B = P · G rows, row b continues prompt
        b // G. Without it, every completion has a copy of its prompt's cache.

        prompts: the cache that `prefill` made of P rows of `time` tokens; used: bool [P, time], those that are not
        padding. cache: of the rows' own tokens, with the shapes of `ring`; its states are at first those of the
        prompts. The token is written to its entry `step`, and sees its prompt's used tokens and the entries up to
        `step`.
        """
        raise NotImplementedError

    def extend(
        self, params: Any, cache: Any, tokens: Any, start: Any, count: Any = None
    ) -> tuple[jax.Array, Any]:
        """Continue each row's cached tokens by `time` more: (hidden states [B, time, hidden], cache with them). Without
        it, every turn of a conversation is prefilled again, from its first token on.

        cache: with the shapes of `ring`, its entry p the token at position p. tokens: int32 [B, time], at positions
        start … start + time - 1, which are entries of the cache; start: int32 [B]. A token sees the entries up to its
        own. What lies behind a row's last token is overwritten before it is seen, so that the last of `tokens` may be
        padding. params: plain or from `prepare`, as for `unembedding`.
        count: int32 [B], the tokens of a row before its padding, given where the cache has states (a model without them
        needs no such parameter); None: all. A row that starts at 0 starts from no tokens, whatever state it has.
        """
        raise NotImplementedError

    def with_lora(self, lora: Lora | None) -> Self:
        """Return the model with these adapters, or without any. Raises InputError where the family takes none.

        An adapter is {"adapter": {"lora_a", "lora_b"}} next to the kernel [layers, in, out] of each of `lora.targets`.
        """
        raise InputError(f"lora: models of {type(self).__name__} take no adapters")

    def quantized_as(self, kind: Quantization | None) -> Self:
        """Return the model with the matrices of its layers in few bits, see `quantized.layout`, or in float32.

        Raises InputError where the family cannot.
        """
        if kind is None:
            return self
        raise InputError(f"lora.base: models of {type(self).__name__} cannot be quantized; leave it out")

    def module_names(self) -> dict[str, list[str]]:
        """Return {dotted path of a linear layer within `layers`: its name in the files, by layer}."""
        shapes = self.with_lora(None).abstract_params()
        counts = {path[1:-1]: leaf.shape[0] for path, leaf in paths(shapes) if path[0] == "layers"}
        return {
            module: [f"model.layers.{i}.{module}" for i in range(counts[tuple(module.split("."))])]
            for module in linear_modules(shapes)
        }

    @property
    def tensor_parallel(self) -> TensorParallel | None:
        """How devices share layers in sampling; None: it uses the shardings of training, whose compiler may then send
        weights for every token."""
        return None

    # What follows is made of the above.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Definition) and self._exact == other._exact

    def __hash__(self) -> int:
        return hash(self._exact)

    @cached_property
    def _exact(self) -> Exact:
        return Exact((type(self), *(getattr(self, each.name) for each in dataclasses.fields(self))))

    def as_policy(self, tokenizer: Any) -> Self:
        """Return the definition of a policy that samples this tokenizer's tokens alone."""
        return dataclasses.replace(self, absent=ids_without_token(tokenizer, self.vocab_size))

    def computing(
        self, *, dtype: str | None = None, remat: str = "auto", attention: AttentionOver | None = None
    ) -> Self:
        """Return the model with another dtype, remat or attention, see `Decoder`; None and "auto" keep them.

        Raises InputError for an option that the family does not take.
        """
        given = {"dtype": dtype, "remat": remat, "attention": attention}
        options: dict[str, Any] = {
            name: value for name, value in given.items() if value not in (None, "auto")
        }
        if not options.keys() <= {each.name for each in dataclasses.fields(self)}:
            raise InputError(
                f"{' and '.join(options)}: no effect on models of {type(self).__name__}; leave it out"
            )
        return dataclasses.replace(self, **options) if options else self

    def shardings(self, mesh: AnyMesh) -> dict[str, Any]:
        """Return the parameters' dict with a NamedSharding per leaf."""
        return param_shardings(mesh, self.logical_axes(), self.abstract_params())

    def padded_hidden(self, params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Compute `hidden` of a padded batch, int32 [B, T], padding on either side: [B, T, hidden]."""
        attended = attention_mask != 0
        positions = jnp.maximum(jnp.cumsum(attended, axis=1, dtype=jnp.int32) - 1, 0)
        visible_until = jnp.where(attended, attention_mask.shape[1], 0).astype(jnp.int32)
        return self.hidden(params, input_ids, positions, visible_until)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Compute logits, float32 [B, T, vocab], of hidden states [B, T, hidden]."""
        kernel, cap = self.unembedding(params)
        if kernel is None:
            return hidden.astype(jnp.float32)
        kernel = kernel.astype(hidden.dtype)
        return capped(jnp.einsum("btd,dv->btv", hidden, kernel, preferred_element_type=jnp.float32), cap)

    def padded_logits(self, params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Compute logits, float32 [B, T, vocab], of a padded batch, meaningless where the mask is 0."""
        return self.logits(params, self.padded_hidden(params, input_ids, attention_mask))

    def padded_scores(self, params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> jax.Array:
        """Compute rewards, float32 [B], of a padded batch at each row's last attended token."""
        hidden = self.padded_hidden(params, input_ids, attention_mask)
        last = attention_mask.shape[1] - 1 - jnp.argmax(attention_mask[:, ::-1] != 0, axis=1)
        return self.score(params, jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])


def complete(definition: Definition, params: Mapping[str, Any], mesh: Mesh, seed: int) -> dict[str, Any]:
    """Fit `params` to `definition`: drop leaves that it does not have, and draw missing ones from `seed`."""
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
