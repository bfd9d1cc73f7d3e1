"""Describe the programs of a sampler, for devices that need not exist."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlhf_core.mesh import row_multiple
from rlhf_core.sampling import ConversationSampler, Sampler, bucket, turns
from rlhf_core.sampling.loop import most_steps
from rlhf_core.sampling.placement import abstract_weights, move_weights
from rlhf_topologies.description import PARAMETERS, Program


def sampling_programs(sampler: Any, params: Any, prompts: int) -> list[Program] | None:
    """Describe the programs of a rollout of `prompts` prompts of the greatest length, in which the policy writes as
    much as it may; None: it is a sampler of another kind.

    params: shapes with shardings will do. `Program.calls` are those of a rollout.
    """
    if isinstance(sampler, ConversationSampler):
        return _conversations(sampler, params, prompts)
    return _completions(sampler, params, prompts) if isinstance(sampler, Sampler) else None


def _move(definition: Any, mesh: Any, tensor: int, params: Any) -> Program:
    """The weights in the sampler's layout stay in memory with the trained ones until the rollout ends."""
    lower = partial(move_weights(definition, mesh).lower, params)
    return Program("move the weights", lower, "sample", reads=PARAMETERS)


def _completions(sampler: Sampler, params: Any, prompts: int) -> list[Program]:
    definition, mesh, room = sampler.definition, sampler.mesh, sampler.room
    time = bucket(sampler.max_prompt_length, sampler.max_prompt_length)
    longest = sampler.options.max_completion_length
    sequences = room.prompts * sampler.num_generations
    weights, moving = params, []
    if sampler.shares_layers:
        weights = abstract_weights(definition, mesh)
        moving = [_move(definition, mesh, room.tensor, params)]
    groups = row_multiple(mesh)
    calls = -(-prompts // room.prompts)
    lengths = f"{sampler.max_prompt_length} + {longest}"
    generate = Program(
        f"generate {room.prompts} × {sampler.num_generations}, {lengths} tokens",
        partial(sampler.lower, weights, time),
        "sample",
        calls=calls,
        tokens=prompts * sampler.num_generations * longest / calls,
        steps=most_steps(sequences // groups, room.slots, longest),
        reads=() if sampler.shares_layers else PARAMETERS,
        rows=groups * room.slots,
    )
    return [*moving, generate]


def _conversations(sampler: ConversationSampler, params: Any, prompts: int) -> list[Program]:
    program, room = sampler.program, sampler.room
    conversations = prompts * sampler.num_generations
    model = program.definition
    rows = program.slots * program.shards
    chunk = program.chunks[-1]
    fed = program.rows(chunk) * program.shards
    pieces = -(-sampler.max_prompt_length // chunk)
    steps = -(-conversations // rows) * sampler.conversation_length
    lengths = f"{sampler.max_prompt_length} + {sampler.conversation_length}"
    extend = Program(
        f"extend {fed} × {chunk}",
        partial(sampler.lower, ("extend", chunk)),
        "read",
        calls=-(-conversations // fed) * pieces,
        tokens=min(fed * chunk, conversations * sampler.max_prompt_length),
        rows=fed,
    )
    decode = Program(
        f"decode {rows} conversations, {lengths} tokens",
        partial(sampler.lower, ("decode", program.length)),
        "sample",
        calls=-(-steps // turns.STEPS),
        tokens=conversations * sampler.conversation_length / -(-steps // turns.STEPS),
        steps=turns.STEPS,
        rows=rows,
    )
    moving = [_move(model, program.mesh, room.tensor, params)] if program.shared_layers else []
    return [*moving, extend, decode]
