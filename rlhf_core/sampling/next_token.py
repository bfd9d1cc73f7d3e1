"""What a sampling step does with hidden states: choose each row's next token, and see whether that is the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.logprobs import unembed, without
from rlhf_core.models import Definition
from rlhf_core.sampling.filters import (
    filtered,
    min_p_filter,
    repetition_penalty,
    sample_token,
    top_k_rows_filter,
    top_p_filter,
)
from rlhf_core.sampling.placement import Peers

if TYPE_CHECKING:
    from rlhf_core.sampling import SamplingOptions

ENDED = 1
"""A token that ends its completion: a stop token, or one that completes a stop string."""
CUT = 2
"""A token that ends its completion because no more are allowed."""


class RowSettings(NamedTuple):
    """How each row is sampled, [B], where rows differ; see `rlhf_core.contracts.TurnSettings`."""

    keys: Any
    """uint32 [B, words]."""
    temperature: Any
    """float32; 0: the most likely token."""
    top_p: Any
    """float32; 1: all."""
    top_k: Any
    """int32; the size of the vocabulary: all."""
    min_p: Any
    """float32; 0: all."""
    stop_ids: Any
    """int32 [B, n]; -1: none."""
    alternatives: Any
    """bool."""


class Stops(NamedTuple):
    """What ends a completion by itself."""

    ids: jax.Array
    """int32 [n], stop tokens; or [B, n], each row's."""
    table: jax.Array | None
    """Unsigned [states, V], from `rlhf_core.sampling.stop_strings`; None: no stop strings."""

    @classmethod
    def of(cls, ids: tuple[int, ...], table: jax.Array | None) -> Self:
        return cls(jnp.asarray(ids, jnp.int32), table)

    def after(self, token: jax.Array, matched: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Compute (whether `token`, int32 [B], stops its row, bool [B], the table's state after it, int32 [B]).

        matched: int32 [B], the state before it; None without stop strings.
        """
        stopped = (token[:, None] == self.ids).any(-1)
        if self.table is not None:
            matched = self.table[matched, token].astype(jnp.int32)
            stopped |= matched == self.table.shape[0] - 1
        return stopped, matched


@dataclass(frozen=True)
class TokenSampler:
    """Samples tokens from hidden states; of the devices that share layers, each for its part of the rows."""

    kernel: jax.Array | None
    softcap: float | None
    peers: Peers
    vocab_size: int
    absent: tuple[tuple[int, int], ...]
    options: SamplingOptions
    key_type: str

    @classmethod
    def of(
        cls, model: Definition, params: Any, peers: Peers, options: SamplingOptions, key_type: str
    ) -> Self:
        kernel, softcap = model.unembedding(params)
        if kernel is not None:
            kernel = peers.own_columns(kernel, model.vocab_size)
        return cls(kernel, softcap, peers, model.vocab_size, model.absent, options, key_type)

    def sample(
        self, hidden: jax.Array, keys: jax.Array, drawn: jax.Array, seen: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Sample (tokens int32 [B], their log-probabilities float32 [B], nats) after `hidden`, [B, hidden].

        keys: uint32 [B, words], each row's key; drawn: int32 [B], the number of the token in its completion. seen: bool
        [B, V], the tokens that the repetition penalty applies to; None without one.
        """
        logits = self._logits(hidden)
        own_keys, own_drawn, seen = self.peers.own_rows((keys, drawn, seen))
        sampled = _choose(logits, _uniforms(own_keys, own_drawn, self.key_type), self.options, seen)
        return self.peers.join(*sampled, len(drawn))

    def judge(self, hidden: jax.Array, targets: jax.Array, count: int) -> tuple[jax.Array, ...]:
        """Compare the tokens `targets`, int32 [B], after `hidden`, [B, hidden], with all others, at temperature 1.

        Returns their ranks, int32 [B], and log-probabilities, float32 [B], and the `count` likeliest tokens, int32
        [B, n], with theirs, float32 [B, n].
        """
        logps = jax.nn.log_softmax(self._logits(hidden))
        rows = len(targets)
        own = jnp.take_along_axis(logps, self.peers.own_rows(targets)[:, None], axis=-1)
        ranks = 1 + (logps > own).sum(-1, dtype=jnp.int32)
        best, ids = lax.top_k(logps, count)
        return *self.peers.join(ranks, own[:, 0], rows), *self.peers.join(ids, best, rows)

    def _logits(self, hidden: jax.Array) -> jax.Array:
        """Compute the logits of this device's rows, float32 [B, V]."""
        if self.kernel is not None and self.kernel.shape[1] < self.vocab_size:
            logits = self.peers.exchange(unembed(hidden, self.kernel, self.softcap))
        else:
            logits = unembed(self.peers.own_rows(hidden), self.kernel, self.softcap)
        return without(logits, self.absent, self.vocab_size)

    def sample_own(
        self, hidden: jax.Array, own: RowSettings, drawn: jax.Array, active: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Sample as `sample` does, each row by its own settings; and return the `count` likeliest tokens, int32 [B, n],
        with their log-probabilities, float32 [B, n], where an active row, bool [B], asks for them; else zeros.
        """
        logits = self._logits(hidden)
        rows = len(drawn)
        own, drawn, active = self.peers.own_rows((own, drawn, active))
        uniforms = _uniforms(own.keys, drawn, self.key_type)
        token, logp, policy, normalizer = _choose_own(logits, uniforms, own, active)

        def likeliest(policy: jax.Array) -> tuple[jax.Array, jax.Array]:
            best, ids = lax.top_k(policy, count)
            return ids, best - normalizer[:, None]

        def none(policy: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros((len(policy), count), jnp.int32), jnp.zeros((len(policy), count), policy.dtype)

        ids, best = lax.cond((own.alternatives & active).any(), likeliest, none, policy)
        return *self.peers.join(token, logp, rows), *self.peers.join(ids, best, rows)


def mark(seen: jax.Array, tokens: jax.Array, used: jax.Array | bool) -> jax.Array:
    """Set `seen`, bool [B, V], at those of tokens, int32 [B, n], that are `used`."""
    used = jnp.broadcast_to(used, tokens.shape)
    return jax.vmap(lambda row, token, use: row.at[token].max(use))(seen, tokens, used)


def _uniforms(keys: jax.Array, counts: jax.Array, key_type: str) -> jax.Array:
    """Draw float32 [B, 2] in [0, 1) for tokens number `counts`, int32 [B], of sequences with `keys`, uint32 [B, …]."""

    def of_sequence(key: jax.Array, count: jax.Array) -> jax.Array:
        own = jax.random.wrap_key_data(key, impl=key_type)
        return jax.random.uniform(jax.random.fold_in(own, count), (2,))

    return jax.vmap(of_sequence)(keys, counts)


def _choose(
    logits: jax.Array, uniforms: jax.Array, options: SamplingOptions, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Choose (tokens int32 [B], their log-probabilities float32 [B]) from logits [B, V], given uniforms [B, 2].

    The log-probabilities are the policy's, unchanged by penalty and filters.
    """
    greedy = options.temperature == 0

    def scaled(logits: jax.Array) -> jax.Array:
        logits = logits if greedy else logits / options.temperature
        return logits - logits.max(-1, keepdims=True)

    policy = scaled(logits)
    mass = jnp.exp(policy)
    normalizer = jnp.log(mass.sum(-1))
    preferred = policy
    if seen is not None:
        preferred = scaled(repetition_penalty(logits, seen, options.repetition_penalty))
        mass = jnp.exp(preferred)
    if greedy:
        token = jnp.argmax(preferred, axis=-1).astype(jnp.int32)
    else:
        token = sample_token(filtered(mass, options), uniforms)
    return token, jnp.take_along_axis(policy, token[:, None], axis=-1)[:, 0] - normalizer


def _choose_own(
    logits: jax.Array, uniforms: jax.Array, own: RowSettings, active: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Choose as `_choose` does, each row by its settings; also return the unnormalised log-probabilities of all tokens,
    float32 [B, V], and what normalises them, float32 [B].

    What a row gets depends on no other row: a filter that is off for it changes nothing. What no active row, bool [B],
    asks for is not computed.
    """
    greedy = own.temperature == 0
    policy = logits / jnp.where(greedy, 1.0, own.temperature)[:, None]
    policy = policy - policy.max(-1, keepdims=True)
    mass = jnp.exp(policy)
    normalizer = jnp.log(mass.sum(-1))

    def of_rows(mass: jax.Array) -> jax.Array:
        mass = top_k_rows_filter(mass, own.top_k[:, None])
        p = own.top_p[:, None]
        mass = jnp.where(p < 1, top_p_filter(mass, p), mass)
        return min_p_filter(mass, own.min_p[:, None])

    filters = (own.top_k < logits.shape[-1]) | (own.top_p < 1) | (own.min_p > 0)
    mass = lax.cond((filters & active).any(), of_rows, lambda mass: mass, mass)
    token = lax.cond(
        (greedy & active).any(),
        lambda drawn: jnp.where(greedy, jnp.argmax(policy, axis=-1).astype(jnp.int32), drawn),
        lambda drawn: drawn,
        sample_token(mass, uniforms),
    )
    logp = jnp.take_along_axis(policy, token[:, None], axis=-1)[:, 0] - normalizer
    return token, logp, policy, normalizer
