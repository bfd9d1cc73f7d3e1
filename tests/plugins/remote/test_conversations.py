"""Conversations with an engine, which is a function here: none waits for another, and none depends on another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rlhf_remote import engines, sampling, stations

from rlhf_core import SAMPLER, installed_registry
from rlhf_core.contracts import Continuation
from rlhf_core.sampling import SamplingOptions

sampler: Any = partial(installed_registry().get, SAMPLER)
TURNS, LIMITS = 3, (5, 2, 4)


class Engine:
    """Writes ids that depend on all that it is given."""

    url = "http://engine"

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        del url, api_key, timeout

    def complete(
        self, model: str, prompt: Any, n: int, seed: int, wanted: Any
    ) -> list[engines.SampledCompletion]:
        assert (model, n) == ("policy-here-v0", 1)
        draw = np.random.default_rng([seed, *prompt])
        ids = draw.integers(3, 48, wanted.max_tokens).tolist()
        return [engines.SampledCompletion(ids, [-float(i) for i in ids], finished=False)]

    def models(self) -> dict[str, Any]:
        return {"policy-here-v0": None}


class World:
    """Answers every turn with its length; a conversation that is `held` only when all others have ended."""

    def __init__(self, held: int) -> None:
        self.held, self.waiting = held, list[int]()
        self.turns: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}

    def submit(self, conversation: int, tokens: Any, logps: Any, finished: bool) -> None:
        assert (logps == -tokens).all()
        assert not finished
        self.turns[conversation].append(tokens.tolist())
        self.waiting.append(conversation)

    def replies(self, *, wait: bool) -> list[Continuation]:
        del wait
        others = [turns for number, turns in self.turns.items() if number != self.held]
        over = all(len(turns) == TURNS for turns in others)
        ready = [number for number in self.waiting if over or number != self.held]
        self.waiting = [number for number in self.waiting if number not in ready]
        return [self.answer(number) for number in ready]

    def answer(self, number: int) -> Continuation:
        if len(self.turns[number]) == TURNS:
            return Continuation(number, None)
        said = np.array([len(self.turns[number])], np.int32)
        return Continuation(number, said, LIMITS[len(self.turns[number])], replaces=number == 2)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sampling.PublishingSampler:
    monkeypatch.setitem(engines.KINDS, "rlhf", Engine)  # type: ignore[arg-type]
    monkeypatch.setattr(sampling.PublishingSampler, "_load", lambda *_: None)
    monkeypatch.setattr(sampling, "_STATIONS", {})
    inputs = SimpleNamespace(
        directory=tmp_path,
        definition=SimpleNamespace(vocab_size=48, absent=(), lora=None),
        options=SamplingOptions(max_completion_length=LIMITS[0]),
        stop_ids=(1,),
        num_generations=2,
        max_prompt_length=2,
        conversation_length=40,
        draws=False,
    )
    return sampling.PublishingSampler(sampler("rlhf", urls=["http://engine"]), inputs)


def test_the_completions_of_a_prompt_go_by_the_number_of_its_first(
    made: sampling.PublishingSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(
        self: Any, model: str, prompt: Any, n: int, seed: int, wanted: Any
    ) -> list[engines.SampledCompletion]:
        draw = np.random.default_rng([seed, *prompt])
        ids = draw.integers(3, 48, (n, wanted.max_tokens)).tolist()
        return [engines.SampledCompletion(each, [-1.0] * len(each), finished=False) for each in ids]

    monkeypatch.setattr(Engine, "complete", complete)
    policy = stations.PublishedPolicy("policy-here-v0", tmp_path, 0)
    prompts, numbers = [np.array([7, 8]), np.array([9])], np.array([20, 21, 22, 23])
    rollouts = made(policy, prompts, jax.random.key(2), numbers)
    words = np.asarray(jax.random.key_data(jax.random.key(2))).tolist()
    for i, prompt in enumerate(prompts):
        seed = int(np.random.SeedSequence([*words, int(numbers[2 * i])]).generate_state(1)[0] >> 1)
        wanted = np.random.default_rng([seed, *prompt.tolist()]).integers(3, 48, (2, LIMITS[0]))
        np.testing.assert_array_equal(rollouts.tokens[2 * i : 2 * i + 2], wanted)


def test_a_turn_is_asked_for_as_soon_as_its_own_conversation_is_ready(
    made: sampling.PublishingSampler, tmp_path: Path
) -> None:
    """Which one is slow changes no token. Contexts have all that was said, or what replaces it."""
    policy = stations.PublishedPolicy("policy-here-v0", tmp_path, 0)
    prompts, ids = [np.array([7, number], np.int32) for number in range(3)], np.array([4, 5, 9])
    found = []
    for held in range(3):
        world = World(held)
        made.converse(policy, prompts, jax.random.key(2), ids, world)
        found.append(world.turns)
    assert found[0] == found[1] == found[2]
    assert [[len(turn) for turn in turns] for turns in found[0].values()] == [list(LIMITS)] * 3
    words = np.asarray(jax.random.key_data(jax.random.key(2))).tolist()
    for number, turns in found[0].items():
        context = prompts[number].tolist()
        for turn, said in enumerate(turns):
            entropy = [*words, int(ids[number]), *([turn] if turn else [])]
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
            assert said == np.random.default_rng([seed, *context]).integers(3, 48, LIMITS[turn]).tolist()
            context = [turn + 1] if number == 2 else [*context, *said, turn + 1]


def test_the_newest_policy_that_no_rollout_waits_for_stays(
    made: sampling.PublishingSampler, tmp_path: Path
) -> None:
    """A run that is killed before its next checkpoint samples with it again. Engines forget the others."""
    forgotten = list[str]()
    (station,) = made.stations
    station.engine.unload_adapter = forgotten.append
    policies = [made._policy(version) for version in range(5)]
    for policy in policies:
        policy.path.mkdir(parents=True)
        (policy.path / sampling.PROBE_FILE).touch()
    station.adapters = {policy.name for policy in policies[1:]}
    station.loaded = {policy.name for policy in policies[2:]}  # it has failed since it was given the first
    made.retire(3)
    assert [policy.path.is_dir() for policy in policies] == [False, False, True, True, True]
    assert forgotten == [policies[1].name]
    assert station.loaded == {policy.name for policy in policies[2:]}
