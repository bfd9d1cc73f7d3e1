"""Hold conversations with a sampler that completes prompts: each turn of all conversations is one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlhf_core.contracts import SamplerFunction, World
from rlhf_core.sampling.turns import turn_number


def converse_by_turns(
    sampler: SamplerFunction,
    params: Any,
    prompts: Sequence[np.ndarray],
    key: jax.Array,
    ids: np.ndarray,
    world: World,
) -> None:
    """Sample the turns of conversations with `world`; conversations wait for each other after every turn.

    sampler: with num_generations 1; the prompts of a call are everything that was said, so that its max_prompt_length
    is that of a prompt and a conversation. The rest as in `Sampler.converse`, whose completions are the same.
    """
    contexts = {i: np.asarray(prompt, np.int32) for i, prompt in enumerate(prompts)}
    limits: dict[int, int] = {}
    turn = 0
    while contexts:
        numbers = list(contexts)
        of_turn = key if turn == 0 else jax.random.fold_in(key, turn_number(turn))
        rollouts = sampler(params, [contexts[i] for i in numbers], of_turn, np.asarray(ids)[numbers])
        for row, number in enumerate(numbers):
            length = int(rollouts.lengths[row])
            limit = limits.get(number, length)
            tokens = rollouts.tokens[row, : min(length, limit)]
            contexts[number] = np.concatenate([contexts[number], tokens])
            finished = bool(rollouts.finished[row]) and length <= limit
            world.submit(number, tokens, rollouts.logps[row, : len(tokens)], finished)
        owed = set(numbers)
        while owed:
            for reply in world.replies(wait=True):
                number = reply.conversation
                owed.remove(number)
                if reply.tokens is None:
                    del contexts[number]
                else:
                    added = np.asarray(reply.tokens, np.int32)
                    contexts[number] = added if reply.replaces else np.concatenate([contexts[number], added])
                    limits[number] = reply.limit
        turn += 1
