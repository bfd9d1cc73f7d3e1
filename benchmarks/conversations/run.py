"""Time conversations whose caches stay in slots against conversations of whole calls, over the same made-up world.

    python benchmarks/conversations/run.py [--conversations 64] [--rounds 5] [--turns 12] [--late]

Episodes have a geometric number of turns. Both sample the same tokens, which is checked. They are timed in turn, after
each has run once to compile. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from rlhf_core import SamplerInputs
from rlhf_core.contracts import Continuation
from rlhf_core.mesh import make_mesh
from rlhf_core.models import find_family
from rlhf_core.sampling import ConversationSampler, Sampler, SamplingOptions, converse_by_turns

VOCAB, GROUP, LONGEST_PROMPT, TURN, REPLY = 1024, 4, 64, 32, 24
CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
GOES_ON = 0.75
"""The probability that an episode has another turn."""
KEY = jax.random.key(0)


class Episodes:
    """A world that draws from a turn's tokens whether the episode goes on, and what it says.

    quick: replies at once; otherwise to one in four of those that wait, in turn.
    """

    def __init__(self, quick: bool, most: int) -> None:
        self.quick, self.most = quick, most
        self.turns: dict[int, list[bytes]] = {}
        self._late: list[Continuation] = []

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        turns = self.turns.setdefault(conversation, [])
        turns.append(np.asarray(tokens).tobytes())
        draw = np.random.default_rng([len(turns), *tokens.tolist()])
        reply = Continuation(conversation, None)
        if len(turns) < self.most and draw.random() < GOES_ON:
            tokens = draw.integers(0, VOCAB, draw.integers(4, REPLY + 1)).astype(np.int32)
            reply = Continuation(conversation, tokens, TURN)
        self._late.append(reply)

    def replies(self, *, wait: bool) -> Sequence[Continuation]:
        count = len(self._late) if self.quick else -(-len(self._late) // 4)
        arrived, self._late = self._late[:count], self._late[count:]
        return arrived


def samplers(count: int, most: int) -> dict[str, Callable[[Episodes], None]]:
    """Make {name: what holds all conversations with a world}."""
    definition = find_family(CONFIG["model_type"]).define(CONFIG, "lm")
    params = jax.jit(definition.init)(jax.random.key(1))
    following = most * (TURN + REPLY)
    common: dict[str, Any] = {
        "mesh": make_mesh(devices=jax.devices()[:1]),
        "stop_ids": tuple(range(VOCAB // 16)),  # turns have about 16 tokens
        "prompts_per_call": count,
    }
    options = SamplingOptions(max_completion_length=TURN)
    whole = Sampler(
        SamplerInputs(
            definition=definition, options=options, max_prompt_length=LONGEST_PROMPT + following, **common
        )
    )
    kept = ConversationSampler(
        SamplerInputs(
            definition=definition,
            options=options,
            max_prompt_length=LONGEST_PROMPT,
            conversation_length=following,
            **common,
        )
    )
    draw = np.random.default_rng(0)
    prompts = [
        draw.integers(0, VOCAB, draw.integers(16, LONGEST_PROMPT + 1)).astype(np.int32)
        for _ in range(count // GROUP)
    ]
    conversations = [prompt for prompt in prompts for _ in range(GROUP)]
    ids = np.arange(len(conversations))
    return {
        "converse": lambda world: kept.converse(params, conversations, KEY, ids, world),
        "by_turns": lambda world: converse_by_turns(whole, params, conversations, KEY, ids, world),
    }


def measure(count: int, rounds: int, most: int, quick: bool) -> dict[str, Any]:
    """Time both in turn; the first turn does not count."""
    seconds: dict[str, list[float]] = {"converse": [], "by_turns": []}
    both = samplers(count, most)
    for number in range(rounds + 1):
        worlds = {}
        for name, hold in both.items():
            worlds[name] = Episodes(quick, most)
            start = time.perf_counter()
            hold(worlds[name])
            if number:
                seconds[name].append(time.perf_counter() - start)
        if worlds["converse"].turns != worlds["by_turns"].turns:
            raise SystemExit("the two sampled different tokens")
    turns = [len(said) for said in worlds["converse"].turns.values()]
    ratios = [ours / theirs for ours, theirs in zip(seconds["converse"], seconds["by_turns"], strict=True)]
    return {
        "turns": {"total": sum(turns), "median": statistics.median(turns), "most": max(turns)},
        "tokens": sum(len(turn) // 4 for said in worlds["converse"].turns.values() for turn in said),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "seconds": {name: round(statistics.median(values), 2) for name, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversations in slots, against whole calls.")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=12, help="the most turns of an episode; 1: completions")
    parser.add_argument("--late", action="store_true", help="the world does not reply at once")
    arguments = parser.parse_args()
    found = measure(arguments.conversations, arguments.rounds, arguments.turns, not arguments.late)
    versions = {name: version(name) for name in ("jax", "numpy")}
    machine = {"platform": jax.default_backend(), "cores": os.cpu_count(), "versions": versions}
    print(json.dumps({"conversations": arguments.conversations, **found, **machine}))


if __name__ == "__main__":
    main()
