"""Conversations in slots against conversations of whole calls: the same tokens, whatever the model and the options."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.contracts import Continuation
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Decoder, Definition
from rlhf_core.sampling import Sampler, converse_by_turns, make_sampler
from rlhf_core.sampling.devices import Devices
from tests.shared import samplers, worlds
from tests.shared.decoder_configs import defined

KEY = jax.random.key(4)
VOCAB, LONGEST_PROMPT, FOLLOWING = samplers.VOCAB, 24, 120
SIZES = {**samplers.SIZES, "initializer_range": 0.3}


def define(name: str, **changes: Any) -> Definition:
    made = defined({**SIZES, **samplers.FAMILIES[name]}, "lm")
    return type("Changed", (Decoder,), changes)(config=made.config) if changes else made  # type: ignore[attr-defined]


@functools.cache
def draw(name: str) -> Any:
    return jax.jit(define(name).init)(jax.random.key(1))


def make_prompts(*lengths: int, group: int = 3) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCAB, length).astype(np.int32) for length in lengths]
    return [prompt for prompt in prompts for _ in range(group)]


PROMPTS = make_prompts(1, 12, LONGEST_PROMPT)
IDS = np.arange(50, 50 + len(PROMPTS))


@pytest.fixture
def hold(
    in_slots: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[int, list[Any]]]:
    """Hold the conversations of PROMPTS, and return what the world was told."""

    def run(
        name: str = "llama",
        *,
        slots: int = 1000,
        world: Any = None,
        mesh: Any = None,
        tensor: int | None = None,
        by_turns: bool = False,
        changes: dict[str, Any] | None = None,
        prompts: list[np.ndarray] = PROMPTS,
        ids: np.ndarray | None = None,
        stop_ids: tuple[int, ...] = (3,),
        **options: Any,
    ) -> dict[int, list[Any]]:
        in_slots(slots)
        definition, world = define(name, **changes or {}), world or worlds.MadeUp(VOCAB)
        mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
        longest = LONGEST_PROMPT + FOLLOWING
        inputs = samplers.inputs(
            definition,
            mesh,
            stop_ids=stop_ids,
            tensor=tensor,
            prompts_per_call=len(PROMPTS),  # of however many prompts, so that programs are the same
            max_prompt_length=LONGEST_PROMPT,
            conversation_length=None if by_turns else FOLLOWING,
            **{"max_completion_length": 8, **options},
        )
        sampler = make_sampler(inputs)
        params = jax.device_put(draw(name), definition.shardings(mesh))
        ids = IDS[: len(prompts)] if ids is None else ids
        if hasattr(sampler, "converse"):
            sampler.converse(params, prompts, KEY, ids, world)
        else:
            monkeypatch.setattr("rlhf_core.sampling.sampler.SHORTEST_BUCKET", longest)  # one program
            sampler = Sampler(replace(inputs, max_prompt_length=longest, conversation_length=None))
            most = sys.maxsize if by_turns else FOLLOWING
            converse_by_turns(sampler, params, prompts, KEY, ids, world, conversation_length=most)
        said: dict[int, list[Any]] = world.said
        return said

    return run


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"temperature": 0.8, "top_k": 12, "top_p": 0.9}),
    ("qwen2", {"temperature": 0.0, "repetition_penalty": 1.4}),
    ("gemma2", {"repetition_penalty": 0.7, "min_p": 0.05}),
    ("mixtral", {"stop_token_ids": (5, 11)}),
    ("qwen3_5", {"repetition_penalty": 0.7, "top_p": 0.95}),
    ("lfm2", {"min_p": 0.05}),
    ("gemma4", {"top_k": 12}),
]
KEPT = ("qwen3_5",)


@pytest.mark.parametrize(
    ("name", "options"),
    [each if each[0] in KEPT else pytest.param(*each, marks=pytest.mark.long) for each in OPTIONS],
    ids=str,
)
def test_turns_are_those_of_whole_calls(name: str, options: dict[str, Any], hold: Any) -> None:
    """With a slot for each; for some, where they keep them and where they give them up; with replaced contexts."""
    expected = hold(name, by_turns=True, world=worlds.MadeUp(VOCAB, replaces=0.3), **options)
    turns = [turn for said in expected.values() for turn in said]
    assert len({len(said) for said in expected.values()}) > 1
    assert 0 < sum(turn.finished for turn in turns) < len(turns)
    cases = [(1000, None), (1000, 1), (4, None), (4, 2)]
    for slots, seed in cases[-1:] if name in ("qwen2", "mixtral") else cases:
        world = worlds.MadeUp(VOCAB, replaces=0.3, seed=seed)
        worlds.assert_same(hold(name, slots=slots, world=world, **options), expected)
        assert any(reply.replaces for replies in world.added.values() for reply in replies)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "axes", "tensor", "options"),
    [
        ("lfm2", {"data": 4, "fsdp": 2}, 2, {}),
        ("gemma2", {"fsdp": 8}, 4, {"top_k": 9}),
        ("qwen2", {"data": 2, "fsdp": 2, "tensor": 2}, 2, {"repetition_penalty": 1.3}),
    ],
    ids=str,
)
def test_a_mesh_changes_nothing(
    name: str, axes: dict[str, int], tensor: int, options: dict[str, Any], hold: Any
) -> None:
    """With a slot for each, and with fewer, whose world answers late and in any order."""
    expected = hold(name, **options)
    for slots, seed in ((1000, None), (1, 3)):
        world = worlds.MadeUp(VOCAB, seed=seed)
        found = hold(name, mesh=make_mesh(**axes), tensor=tensor, slots=slots, world=world, **options)
        worlds.assert_same(found, expected)


def test_stop_strings_and_the_penalty_of_a_turn(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string that begins in one turn does not end in the next; the penalty sees what the world said."""
    model = tiny.make_model(scale=6.0)
    words = len(model.tokenizer)
    prompts = [np.array([7, 8, 9], np.int32)] * 12
    common: dict[str, Any] = {"stop_ids": (), "tokenizer": model.tokenizer, "prompts_per_call": len(prompts)}
    common |= {"stop_strings": ("a", "eb", "kk", "m"), "repetition_penalty": 1.2, "max_completion_length": 7}
    monkeypatch.setattr("rlhf_core.sampling.sampler.SHORTEST_BUCKET", 103)  # one program
    told = []
    for by_turns in (True, False):
        lengths: dict[str, Any] = {"max_prompt_length": 3, "conversation_length": 100}
        if by_turns:
            lengths = {"max_prompt_length": 103}
        world = worlds.MadeUp(words)
        sampler = make_sampler(samplers.inputs(model.definition, model.mesh, **common, **lengths))
        if by_turns:
            converse_by_turns(sampler, model.params, prompts, KEY, np.arange(12), world)
        else:
            sampler.converse(model.params, prompts, KEY, None, world)
        told.append(world.said)
    worlds.assert_same(*told, atol=2e-5)
    ends = [turn.finished for said in told[0].values() for turn in said]
    assert 0 < sum(ends) < len(ends)


class Script:
    """A world that replies with what the test lists, and then ends."""

    def __init__(self, *replies: Continuation) -> None:
        self.said: list[np.ndarray] = []
        self._replies = list(replies)

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        self.said.append(tokens)

    def replies(self, *, wait: bool) -> list[Continuation]:
        return [self._replies.pop(0) if self._replies else Continuation(0, None)]


def test_the_last_turn_ends_with_the_conversation_length(hold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written behind the last entry of the cache, and what is before it is as in whole calls."""
    options = {"prompts": PROMPTS[-1:], "max_completion_length": 50, "stop_ids": ()}
    added = np.arange(5, 15, dtype=np.int32)
    replies = [Continuation(0, added, 30), Continuation(0, added, 50)]
    scripts = [Script(*replies) for _ in range(3)]
    # A family that cannot extend caches takes whole calls by itself: with one program for these and the expected ones.
    monkeypatch.setattr("rlhf_core.sampling.sampler.SHORTEST_BUCKET", LONGEST_PROMPT + FOLLOWING)
    whole_calls = {"changes": {"extend": Definition.extend}}
    for script, changes in zip(scripts, ({}, whole_calls, {**whole_calls, "by_turns": True}), strict=True):
        hold(world=script, **changes, **options)
    *cut, whole = (script.said for script in scripts)
    assert [len(turn) for turn in whole] == [50, 30, 50]
    for said in cut:
        assert [len(turn) for turn in said] == [50, 30, FOLLOWING - 100]
        for turn, other in zip(said, whole, strict=True):
            np.testing.assert_array_equal(turn, other[: len(turn)])


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Continuation(0, np.zeros(FOLLOWING, np.int32), 4), "at most 144"),
        (Continuation(0, np.zeros(0, np.int32), 4, replaces=True), "must have tokens"),
        (Continuation(0, np.zeros(3, np.int32), 0), "at least one"),
        (Continuation(7, np.zeros(3, np.int32), 4), "must follow a turn"),
    ],
)
def test_a_continuation_that_does_not_fit_is_refused(reply: Continuation, message: str, hold: Any) -> None:
    with pytest.raises(ValueError, match=message):
        hold(world=Script(reply), prompts=PROMPTS[-1:])


def test_calls_that_cannot_be_are_refused(hold: Any) -> None:
    with pytest.raises(InputError, match="prompt 2 has no tokens"):
        hold(prompts=[PROMPTS[0], PROMPTS[0][:0]])
    with pytest.raises(ValueError, match="one entry per conversation"):
        hold(ids=IDS[:2])
    hold(prompts=[])


def test_a_prompt_is_fed_once_and_a_turn_feeds_what_is_new(
    hold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    feed = Devices.feed

    def spy(self: Devices, pieces: Any, own: Any = None) -> None:
        fed.extend(len(tokens) for *_, tokens in pieces)
        feed(self, pieces, own)

    monkeypatch.setattr(Devices, "feed", spy)
    world = worlds.MadeUp(VOCAB)
    hold(world=world)
    replies = [reply.tokens for said in world.added.values() for reply in said if reply.tokens is not None]
    # Of a prompt all but its last token; of a reply as many tokens as it has, for the turn's last one is fed with it.
    assert sum(fed) == sum(len(prompt) - 1 for prompt in PROMPTS[::3]) + sum(map(len, replies))
