"""Completions sampled from a policy, with the log-probability of every token.

A prompt is prefilled once, however many completions it gets. Sequences are decoded in a few slots; one that ends makes
room for the next. Prompts are padded on the left to one of a few lengths. Prefill and loop are one program.
Each sequence has a key of its own: what it samples does not depend on its neighbours or on how calls are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import numpy as np
from pydantic import Field

from rlhf_core.config import Options
from rlhf_core.errors import InputError
from rlhf_core.mesh import (
    AnyMesh,
    abstract_rows,
    put_rows,
    replicated_sharding,
    row_multiple,
    rows_per_device,
)
from rlhf_core.runtime.background import Ahead
from rlhf_core.sampling.loop import Plan, generate, read
from rlhf_core.sampling.stop_strings import stop_table

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.contracts import SamplerInputs
    from rlhf_core.models import Definition

SLOTS = {"cpu": 32}
"""Sequences a device decodes at once. On a CPU more of them take longer in proportion."""
SLOTS_ACCELERATOR = 256
"""The same where there is no entry above: up to there a step reads weights, and more sequences cost little."""
LAST_SLOTS = 4
"""The last sequences, once a quarter of the slots holds them, are decoded by themselves: not where that is fewer."""
SHORTEST_BUCKET = 32
"""Tokens; prompts are padded to this times a power of two, or to the longest allowed."""


class SamplingOptions(Options):
    """How completions are drawn: repetition_penalty, temperature, top_k, top_p and min_p, in transformers' order;
    and what ends them besides the model's own stop tokens.
    """

    temperature: float = Field(
        default=1.0, ge=0, description="logits are divided by it; 0 takes the likeliest token"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="share of the probability to sample from; 1: all"
    )
    top_k: int | None = Field(default=None, ge=1, description="number of likeliest tokens to sample from")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="least probability, relative to the likeliest token's"
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="logits of the prompt's and the completion's tokens are divided by it where positive, "
        "multiplied where negative; 1: off",
    )
    max_completion_length: int = Field(default=256, ge=1, description="tokens, the stop token included")
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end a completion, with the token that completes one"
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="tokens that end a completion, besides the model's own"
    )


class Rollouts(NamedTuple):
    """N completions, NumPy arrays on every process; C is max_completion_length."""

    tokens: np.ndarray
    """int32 [N, C], 0 after the end."""
    lengths: np.ndarray
    """int32 [N], tokens of the completion, the one that ended it included."""
    logps: np.ndarray
    """float32 [N, C], nats: log-probability under softmax(logits / temperature), without repetition penalty and
    filters; 0 after the end. At temperature 0, under softmax(logits)."""
    finished: np.ndarray
    """bool [N], a stop token was sampled or a stop string completed; False: cut at C."""


class Sampler:
    """Samples `num_generations` completions for each of any number of prompts.

    definition: a language model; its parameters are given with every call and may be spread over `mesh`.
    stop_ids: tokens that end a completion, besides options.stop_token_ids.
    prompts_per_call: prompts that are prefilled at once, rounded up to a multiple of the mesh's rows; their completions
        are sampled in `slots_per_device` slots per device, one after another.
    max_prompt_length: tokens; longer prompts are refused.
    tokenizer: needed for options.stop_strings only. They are looked for in a completion's bytes as `token_bytes`
        gives them, wherever token borders lie, and never across the border of prompt and completion.

    One program is compiled for each padded prompt length: 32, 64, 128, … and max_prompt_length. `warm_up` starts
    to do so ahead of time.

    Raises InputError for stop strings without a tokenizer or that it cannot write, and for stop tokens that the
    model does not have.
    """

    def __init__(
        self,
        definition: Definition,
        options: SamplingOptions,
        *,
        mesh: Mesh,
        stop_ids: Sequence[int],
        num_generations: int = 1,
        prompts_per_call: int,
        max_prompt_length: int,
        tokenizer: Any = None,
    ) -> None:
        if min(num_generations, prompts_per_call, max_prompt_length) < 1:
            raise ValueError(
                "num_generations, prompts_per_call and max_prompt_length must be positive; got "
                f"{num_generations}, {prompts_per_call} and {max_prompt_length}"
            )
        self.definition = definition
        self.options = options
        self.mesh = mesh
        self.stop_ids = tuple(int(i) for i in (*stop_ids, *options.stop_token_ids))
        self.num_generations = num_generations
        multiple = row_multiple(mesh)
        self.prompts_per_call = -(-prompts_per_call // multiple) * multiple
        self.max_prompt_length = max_prompt_length
        self._stop_table = self._table(tokenizer)
        self._ahead = Ahead()

    def __call__(
        self, params: Any, prompts: Sequence[np.ndarray], key: jax.Array, ids: np.ndarray | None = None
    ) -> Rollouts:
        """Completions of `prompts`; those of one prompt are adjacent, N = len(prompts) × num_generations.

        prompts: int [length] each, at least one token.
        key: a typed key, the same on every process. ids: int [N], default 0 … N - 1. Sequence j draws its
        t-th token with fold_in(fold_in(key, ids[j]), t): equal ids and prompts give equal completions.

        Raises InputError for prompts that are empty or longer than max_prompt_length.
        """
        count, groups, longest = len(prompts), self.num_generations, self.options.max_completion_length
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self._check(lengths)
        ids = np.arange(count * groups) if ids is None else np.asarray(ids)
        if ids.shape != (count * groups,):
            raise ValueError(
                f"ids must have one entry a completion, [{count * groups}]; its shape is {ids.shape}"
            )
        ids = ids.astype(np.uint32).reshape(count, groups)
        out = Rollouts(
            np.zeros((count, groups, longest), np.int32),
            np.zeros((count, groups), np.int32),
            np.zeros((count, groups, longest), np.float32),
            np.zeros((count, groups), np.bool_),
        )
        # Prompts of like lengths go together, so that fewer are padded far.
        order = np.argsort(lengths, kind="stable")
        for start in range(0, count, self.prompts_per_call):
            chosen = order[start : start + self.prompts_per_call]
            batch = self._batch([prompts[i] for i in chosen], lengths[chosen], ids[chosen])
            rows = self._rows(len(chosen))
            for whole, part in zip(out, self._run(params, batch, key), strict=True):
                whole[chosen] = part.reshape(-1, *whole.shape[1:])[rows]
        return Rollouts(*(whole.reshape(count * groups, *whole.shape[2:]) for whole in out))

    def warm_up(self, params: Any, lengths: Sequence[int] | np.ndarray) -> None:
        """Start to compile what prompts of `lengths` tokens will need; a call waits for its own program.

        params: placed like those of later calls, whose keys must be of the implementation that jax.random.key makes
        by default.

        Raises InputError as a call does.
        """
        lengths = np.asarray(lengths, np.int32)
        self._check(lengths)
        rows = self.prompts_per_call
        for time in sorted({bucket(int(length), self.max_prompt_length) for length in lengths}):
            tokens, none = np.zeros((rows, time), np.int32), np.zeros(rows, np.int32)
            ids = np.zeros(rows * self.num_generations, np.uint32)
            batch = abstract_rows(self.mesh, (tokens, none, none, ids))
            key_data, plan = self._plan(jax.random.key(0))
            lowered = generate.lower(params, *batch, key_data, self._stop_table, plan=plan)
            self._ahead.compile(time, lowered)

    def _run(self, params: Any, batch: Any, key: jax.Array) -> Any:
        """The fields of `Rollouts` for one batch of `_batch`, all its rows, on the host."""
        self._ahead.wait(batch[0].shape[1])
        key_data, plan = self._plan(key)
        rows = put_rows(self.mesh, batch)
        written, step, slot = jax.device_get(generate(params, *rows, key_data, self._stop_table, plan=plan))
        return read(written, step, slot, self.options.max_completion_length)

    def _plan(self, key: jax.Array) -> tuple[np.ndarray, Plan]:
        slots = slots_per_device(self.mesh, self.prompts_per_call * self.num_generations)
        plan = Plan(
            self.definition,
            self.options,
            self.mesh,
            self.stop_ids,
            self.num_generations,
            slots,
            slots // 4 if slots >= 4 * LAST_SLOTS else 0,
            str(jax.random.key_impl(key)),
        )
        return np.asarray(jax.random.key_data(key)), plan

    def _table(self, tokenizer: Any) -> jax.Array | None:
        """The table of the stop strings, on every device of the mesh; None where there are none."""
        if unknown := [i for i in self.options.stop_token_ids if i >= self.definition.vocab_size]:
            raise InputError(
                f"sampling.stop_token_ids: the model has no token {', '.join(map(str, unknown))}; its ids end at "
                f"{self.definition.vocab_size - 1}"
            )
        if not self.options.stop_strings:
            return None
        if tokenizer is None:
            raise InputError(
                "sampling.stop_strings: there is no tokenizer to tell what tokens write; give one, or use "
                "sampling.stop_token_ids"
            )
        table = stop_table(self.options.stop_strings, tokenizer, self.definition.vocab_size)
        return jax.make_array_from_callback(
            table.shape, replicated_sharding(self.mesh), lambda index: table[index]
        )

    def _check(self, lengths: np.ndarray) -> None:
        problems = [f"prompt {i + 1} has no tokens" for i in np.flatnonzero(lengths == 0)]
        problems += [
            f"prompt {i + 1} has {lengths[i]} tokens, more than max_prompt_length={self.max_prompt_length}; "
            "shorten it or raise max_prompt_length"
            for i in np.flatnonzero(lengths > self.max_prompt_length)
        ]
        if problems:
            raise InputError(*problems)

    def _batch(
        self, prompts: Sequence[np.ndarray], lengths: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """The rows of `generate`: prompts, lengths, last tokens and ids."""
        time = bucket(int(lengths.max()), self.max_prompt_length)
        count = self.prompts_per_call
        tokens, last, sizes = (
            np.zeros((count, time), np.int32),
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
        )
        own = np.zeros((count, self.num_generations), np.uint32)
        rows = self._rows(len(prompts))
        for row, prompt in zip(rows, prompts, strict=True):
            tokens[row, time - len(prompt) + 1 :] = prompt[:-1]
            last[row] = prompt[-1]
        sizes[rows], own[rows] = lengths, ids
        return tokens, sizes, last, own.reshape(-1)

    def _rows(self, count: int) -> np.ndarray:
        """Where `count` prompts stand: dealt out, so that shards have as many, and those of a shard stand first."""
        shards = row_multiple(self.mesh)
        i = np.arange(count)
        return i % shards * (self.prompts_per_call // shards) + i // shards


def slots_per_device(mesh: AnyMesh | None, sequences: int) -> int:
    """How many of `sequences` each device of a mesh decodes at once; None: of one device."""
    most = SLOTS.get(jax.default_backend(), SLOTS_ACCELERATOR)
    return min(rows_per_device(mesh, sequences), most)


def bucket(length: int, longest: int) -> int:
    """The padded length of a prompt: SHORTEST_BUCKET times a power of two, at most `longest`.

    A prompt's last token is not among those that are prefilled.
    """
    size = SHORTEST_BUCKET
    while size < length - 1:
        size *= 2
    return min(size, max(longest - 1, 1))


def make_sampler(inputs: SamplerInputs) -> Sampler:
    """The sampler "jax" of the registry."""
    return Sampler(
        inputs.definition,
        inputs.options,
        mesh=inputs.mesh,
        stop_ids=inputs.stop_ids,
        num_generations=inputs.num_generations,
        prompts_per_call=inputs.prompts_per_call,
        max_prompt_length=inputs.max_prompt_length,
        tokenizer=inputs.tokenizer,
    )
