"""Try an episode before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.environments.calls import EnvironmentCalls, checked_messages, checked_turn
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.environments.conversation import ConversationEncoder

SECONDS = 60.0
"""How long a call may take that has no `timeout`."""
MADE_UP = {"role": "assistant", "content": "The answer is 4."}


def try_episode(
    calls: EnvironmentCalls,
    encoder: ConversationEncoder,
    row: Mapping[str, Any],
    place: str,
    max_prompt_length: int,
) -> str:
    """Begin an episode with a row and answer its prompt with a made-up completion; return a line about it.

    Calls are made in a process of their own where the environment can be sent to one.
    Raises InputError for what the methods raise, or return that is no messages and no turn.
    """
    try:
        limited = calls.options.replace(timeout=calls.options.timeout or SECONDS)
        probe = EnvironmentCalls(limited, calls.make, calls.where)
    except InputError:  # it cannot be sent to another process
        probe = calls
    method, answered = "reset", ""
    try:
        environment, value = probe.wait_for(probe.make(), "reset", dict(row), 0)
        messages = checked_messages(value, "reset")
        prompt = encoder.prompt(messages, tools=calls.tools)
        if len(prompt) > max_prompt_length:
            raise InputError(
                f"{place}: reset returned a prompt of {len(prompt):,} tokens, more than "
                f"max_prompt_length={max_prompt_length:,}; raise it"
            )
        method = "step"
        _, value = probe.wait_for(environment, "step", dict(MADE_UP))
        turn = checked_turn(value)
        if not turn.done:
            reply = [*messages, MADE_UP]
            added = [dict(message) for message in turn.messages]
            answer = encoder.observation(reply, added, ended_by=None, tools=calls.tools)
            answered = f"; the answer to a made-up completion has {len(answer):,}"
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{place}: {probe.explain(method, error)}") from error
    return f"{place} begins with {len(prompt):,} tokens{answered}"
