"""Conversations that begin and end at any time, each with its own settings and weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from rlhf_core.contracts import Beginning, Continuation, TurnSettings, Weights
from rlhf_core.mesh import make_mesh
from rlhf_core.sampling import ConversationSampler, Sampler
from rlhf_core.sampling.packed import PACKED, PIECE, SPAN, PackedContexts, prefill_all
from tests.shared import samplers
from tests.shared.compiled import compilations
from tests.shared.decoder_configs import defined

SLOTS, KEY = 6, jax.random.key(3)
DEFINITION = defined({**samplers.SIZES, "model_type": "llama", "initializer_range": 0.5}, "lm")


class Wish(NamedTuple):
    prompt: list[int]
    limit: int = 12
    seed: int = 0
    settings: Mapping[str, Any] = MappingProxyType({})
    own: int = 0
    """Which weights."""


WISHES = [
    Wish([*range(4, 39)] * 5, limit=6, seed=4),
    Wish([5, 6, 7, 8], seed=1),
    Wish([5, 6, 7, 8], seed=2, settings={"temperature": 0.6, "top_k": 5}),
    Wish([9] * 25, seed=1, settings={"temperature": 1.4, "top_p": 0.7}, own=1),
    Wish([4], limit=30, settings={"temperature": 0.0, "alternatives": True}),
    Wish([4, 11], limit=3, seed=7, settings={"min_p": 0.3, "alternatives": True}),
    Wish([30, 31, 32], seed=8, settings={"stop_ids": (3, 20, 21, 22, 23, 24)}, own=1),
    Wish([12, 13], limit=20, seed=9, settings={"temperature": 0.3, "top_p": 0.9, "top_k": 30, "min_p": 0.01}),
    Wish([5, 6, 7, 8], seed=1, own=1),
    Wish([*range(4, 28), 5], seed=3, settings={"reads_context": True}, own=1),
    Wish([5, 6, 7, 8], seed=1, settings={"reads_context": True}),
]
"""The first one needs a second part of the caches."""


class Asking:
    """A world that begins `wishes`, some of them late."""

    steps = 4

    def __init__(self, wishes: dict[int, Wish], weights: list[Weights]) -> None:
        self.left, self.weights, self.ended = dict(wishes), weights, list[int]()
        self.parts: dict[int, list[Any]] = {number: [] for number in wishes}
        self.finished: dict[int, bool] = {}
        self.contexts: dict[int, list[Any]] = {}

    def replies(self, *, wait: bool) -> list[Any]:
        out: list[Any] = [Continuation(number, None) for number in self.ended]
        self.ended = []
        for number in list(self.left)[:3]:
            wish = self.left.pop(number)
            weights = self.weights[wish.own]
            key = np.asarray(jax.random.key_data(jax.random.fold_in(KEY, wish.seed)))
            settings = TurnSettings(weights, key, **{"stop_ids": (3,), **wish.settings})
            prompt = np.array(wish.prompt, np.int32)
            group = (wish.own, *wish.prompt)
            out.append(Beginning(number, prompt, wish.limit, settings, group))
        return out

    def sampled(self, conversation: int, *what: Any) -> None:
        self.parts[conversation].append(what)

    def read(self, conversation: int, *what: Any) -> None:
        self.contexts.setdefault(conversation, []).append(what)

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        self.finished[conversation] = finished
        self.ended.append(conversation)

    def failed(self, conversation: int) -> None:
        raise AssertionError(conversation)

    def result(self, number: int) -> tuple[Any, ...]:
        tokens, logps, likeliest = zip(*self.parts[number], strict=True)
        return (
            np.concatenate(tokens),
            np.concatenate(logps),
            *(np.concatenate(each) for each in zip(*likeliest, strict=True)),
        )


def make_sampler(slots: int = SLOTS, mesh: Any = None, tensor: int | None = None) -> ConversationSampler:
    lengths = {"max_completion_length": 64, "max_prompt_length": 180, "conversation_length": 40}
    inputs = samplers.inputs(DEFINITION, mesh, tensor=tensor, prompts_per_call=slots, **lengths)
    return ConversationSampler(inputs, alternatives=4)


@pytest.fixture(scope="module")
def sampler() -> ConversationSampler:
    return make_sampler()


@pytest.fixture(scope="module")
def params() -> list[Any]:
    return [jax.jit(DEFINITION.init)(jax.random.key(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def weights(sampler: ConversationSampler, params: list[Any]) -> list[Weights]:
    return [sampler.place(each) for each in params]


def run(sampler: ConversationSampler, weights: list[Weights], wishes: dict[int, Wish]) -> Asking:
    world = Asking(wishes, weights)
    schedule = sampler.open(weights[0], world)
    while schedule.step() or world.left:
        pass
    return world


def test_settings_per_turn(
    sampler: ConversationSampler,
    weights: list[Weights],
    params: list[Any],
) -> None:
    together = run(sampler, weights, dict(enumerate(WISHES)))
    for number, wish in enumerate(WISHES):
        tokens, logps, ids, best = together.result(number)
        # To the bit what it is alone, in another slot.
        alone = run(sampler, weights, {77: wish._replace(settings={**wish.settings, "alternatives": True})})
        assert tokens.tolist() == alone.result(77)[0].tolist()
        assert logps.tobytes() == alone.result(77)[1].tobytes()
        # The log-probabilities of softmax(logits / temperature), in float64.
        logits = samplers.full_logits(DEFINITION, params[wish.own], [*wish.prompt, *tokens])
        at = logits[len(wish.prompt) - 1 : -1] / (wish.settings.get("temperature", 1.0) or 1.0)
        everything = samplers.log_softmax(at)
        np.testing.assert_allclose(logps, everything[np.arange(len(tokens)), tokens], atol=2e-5)
        if wish.settings.get("alternatives"):
            np.testing.assert_allclose(best, -np.sort(-everything)[:, :4], atol=2e-5)
            np.testing.assert_allclose(np.take_along_axis(everything, ids, -1), best, atol=2e-5)
        if wish.settings.get("temperature") == 0:
            assert tokens.tolist() == everything.argmax(-1).tolist()
        if wish.settings.get("reads_context"):
            before = logits[: len(wish.prompt) - 1]
            before -= np.log(np.exp(before).sum(-1, keepdims=True))
            own, ranks, likeliest = zip(*together.contexts[number], strict=True)
            expected = before[np.arange(len(before)), wish.prompt[1:]]
            np.testing.assert_allclose(np.concatenate(own), expected, atol=2e-5)
            order = 1 + (before > expected[:, None]).sum(-1)
            np.testing.assert_array_equal(np.concatenate(ranks), order)
            best = np.concatenate([each[1] for each in likeliest])
            np.testing.assert_allclose(best, -np.sort(-before)[:, :4], atol=2e-5)
        stops = wish.settings.get("stop_ids", (3,))
        assert together.finished[number] == (tokens[-1] in stops)
        assert len(tokens) == wish.limit or tokens[-1] in stops
        assert not set(tokens[:-1]) & set(stops)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7, "temperature": 1.4}, {"top_k": 3, "min_p": 0.05}])
def test_what_the_sampler_of_completions_samples(
    options: dict[str, Any], sampler: ConversationSampler, weights: list[Weights], params: list[Any]
) -> None:
    lengths = {"max_completion_length": 12, "max_prompt_length": 8}
    inputs = samplers.inputs(DEFINITION, prompts_per_call=3, **lengths, **options)
    prompts = [[5, 6, 7], [8], [9, 10]]
    rollouts = Sampler(inputs)(params[0], [np.array(each) for each in prompts], KEY)
    world = run(
        sampler,
        weights,
        {i: Wish(prompt, seed=i, settings=options) for i, prompt in enumerate(prompts)},
    )
    for i in range(3):
        assert world.result(i)[0].tolist() == rollouts.tokens[i, : rollouts.lengths[i]].tolist()


def test_ends_new_weights_and_forgotten_prompts(
    sampler: ConversationSampler, weights: list[Weights], params: list[Any]
) -> None:
    changing = Weights(weights[0].value)
    # The last two wait: one has the prompt of those that run, the other is prefilled meanwhile.
    late = [Wish([5, 6, 7], settings={"temperature": 0.0}), Wish([9, 8, 7], settings={"temperature": 0.0})]
    wishes = [Wish([5, 6, 7], limit=30, settings={"stop_ids": ()})] * SLOTS + late
    world = Asking(dict(enumerate(wishes)), [changing])
    schedule = sampler.open(changing, world)
    for _ in range(3):
        schedule.step()
    assert [conversation.prefilled is None for conversation in schedule.waiting] == [True, False]
    assert len(world.parts[0]) == 3
    changing.value = weights[1].value
    schedule.forget_prompts()
    world.ended += range(SLOTS)
    while schedule.step() or world.ended:
        pass
    assert len(world.parts[0]) == 3
    assert not schedule.slots.active.any()
    fresh = run(sampler, [weights[1]], dict(enumerate(late)))
    for number in range(2):
        assert world.result(SLOTS + number)[1].tobytes() == fresh.result(number)[1].tobytes()


class Calls(list[PackedContexts]):
    """The rows that it is called with, each of which it numbers."""

    def __call__(self, rows: PackedContexts) -> Any:
        self.append(rows)
        return len(self) - 1


def test_contexts_are_packed_whole_and_where_their_bits_do_not_depend_on_the_place(
    sampler: ConversationSampler,
) -> None:
    draw = np.random.default_rng(0)
    for count in range(1, 30):
        contexts = [draw.integers(1, 99, draw.integers(1, PACKED + 1)) for _ in range(count)]
        calls = Calls()
        (found,) = prefill_all(sampler.program, [contexts], calls)
        used = [np.zeros(rows.tokens.shape, bool) for rows in calls]
        for tokens, (call, row, start) in zip(contexts, found, strict=True):
            end = start + len(tokens)
            assert not used[call][row, start:end].any()
            used[call][row, start:end] = True
            assert calls[call].tokens[row, start:end].tolist() == tokens.tolist()
            assert calls[call].positions[row, start:end].tolist() == list(range(len(tokens)))
            assert (calls[call].visible_until[row, start:end] == end).all()
            assert start % PIECE == 0
            assert start == 0 or start // SPAN == (end - 1) // SPAN
        assert all(each.any() for each in used)


@pytest.mark.long
def test_nothing_compiles_after_the_warm_up(params: list[Any]) -> None:
    fresh = make_sampler(SLOTS + 1)
    fresh.warm_up(params[0], [1])
    fresh._ahead.wait_for_all()
    both = [fresh.place(each) for each in params]
    jax.random.key_data(jax.random.fold_in(KEY, 0))  # the world's
    with compilations() as compiled:
        run(fresh, both, dict(enumerate(WISHES)))
    assert not compiled


@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, 2])
def test_settings_per_turn_on_a_mesh(tensor: int, params: list[Any]) -> None:
    """`test_settings_per_turn` has the assertions."""
    mesh = make_mesh(devices=jax.devices()[:4])
    spread = make_sampler(8, mesh, tensor)
    placed = [jax.device_put(each, DEFINITION.shardings(mesh)) for each in params]
    test_settings_per_turn(spread, [spread.place(each) for each in placed], placed)


def test_weights_that_change_in_the_middle(
    sampler: ConversationSampler, weights: list[Weights], params: list[Any]
) -> None:
    changing = Weights(weights[0].value)
    world = Asking({0: Wish([5, 6, 7], limit=30, settings={"stop_ids": ()})}, [changing])
    schedule = sampler.open(changing, world)
    schedule.step()
    changing.value = weights[1].value
    schedule.feed_again()
    while schedule.step():
        pass
    tokens, logps, *_ = world.result(0)
    for some, own in ((slice(0, 4), 0), (slice(4, 30), 1)):
        at = samplers.full_logits(DEFINITION, params[own], [5, 6, 7, *tokens])[2:-1]
        everything = samplers.log_softmax(at)
        np.testing.assert_allclose(logps[some], everything[np.arange(30), tokens][some], atol=2e-5)
