"""Run conversations with a sampler that completes prompts: each turn of all conversations is one call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rlhf_core.contracts import SamplerFunction, World
from rlhf_core.sampling.conversations import begin_conversations
from rlhf_core.sampling.turns import turn_number


def converse_by_turns(
    sampler: SamplerFunction,
    params: Any,
    prompts: Sequence[np.ndarray],
    key: jax.Array,
    ids: np.ndarray,
    world: World,
    *,
    conversation_length: int = sys.maxsize,
) -> None:
    """Sample the turns of conversations with `world`; conversations wait for each other after every turn.

    sampler: with num_generations 1; the prompts of a call are everything that was said, so its max_prompt_length is
    that of a prompt plus a conversation. Other arguments, turns and errors are those of `ConversationSampler.converse`.
    """
    running = {
        conversation.number: conversation
        for conversation in begin_conversations(prompts, conversation_length, sys.maxsize)
    }
    turn = 0
    while running:
        of_turn = key if turn == 0 else jax.random.fold_in(key, turn_number(turn))
        contexts = [conversation.context for conversation in running.values()]
        rollouts = sampler(params, contexts, of_turn, np.asarray(ids)[list(running)])
        for row, conversation in enumerate(running.values()):
            length = int(rollouts.lengths[row])
            finished = bool(rollouts.finished[row]) and length <= conversation.limit
            length = min(length, conversation.limit)
            conversation.written.append((rollouts.tokens[row, :length], rollouts.logps[row, :length]))
            world.submit(conversation.number, *conversation.finish_turn(), finished)
        answering = dict(running)
        while answering:
            for reply in world.replies(wait=True):
                conversation = answering.pop(reply.conversation)
                if reply.tokens is None:
                    del running[reply.conversation]
                else:
                    conversation.continue_with(reply, sys.maxsize)
        turn += 1
