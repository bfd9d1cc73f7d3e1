"""What a conversation is depends on nothing but itself, to the bit; and what slots are given, fed and asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rlhf_topologies.sampling import sampling_programs

from rlhf_core.contracts import Continuation
from rlhf_core.errors import InputError, NonFiniteError
from rlhf_core.mesh import make_mesh, planned_mesh
from rlhf_core.sampling import ConversationSampler, SamplingOptions, cache_bytes, packed, placement, turns
from rlhf_core.sampling.schedule import Conversation, Schedule
from tests.shared import samplers, worlds
from tests.shared.compiled import compilations
from tests.shared.decoder_configs import defined

KEY = jax.random.key(6)
VOCAB, COUNT, LONGEST_PROMPT, FOLLOWING = samplers.VOCAB, 12, 20, 100
CONFIG = {**samplers.SIZES, "model_type": "gemma2", "sliding_window": 12, "initializer_range": 0.4}
DEFINITION = defined(CONFIG, "lm")
OPTIONS = SamplingOptions(max_completion_length=12, repetition_penalty=1.2, top_p=0.95)


def make_sampler(
    slots: int, in_slots: Callable[..., None], options: SamplingOptions = OPTIONS, mesh: Any = None
) -> ConversationSampler:
    in_slots(slots)
    lengths = {"max_prompt_length": LONGEST_PROMPT, "conversation_length": FOLLOWING}
    return ConversationSampler(
        samplers.inputs(DEFINITION, mesh, options=options, prompts_per_call=COUNT, **lengths)
    )


@pytest.fixture(scope="module")
def params() -> Any:
    return jax.jit(DEFINITION.init)(jax.random.key(2))


def make_prompts() -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    one, two, three = (draw.integers(0, VOCAB, n).astype(np.int32) for n in (17, 5, LONGEST_PROMPT))
    return [one] * 5 + [two] * 4 + [three] * 3


def make_world(seed: int | None = None, **options: Any) -> Any:
    return worlds.MadeUp(VOCAB, added=24, replaces=0.1, seed=seed, **options)


def told(slots: int, params: Any, seed: int | None, in_slots: Callable[..., None]) -> dict[int, list[Any]]:
    world = make_world(seed)
    make_sampler(slots, in_slots).converse(params, make_prompts(), KEY, np.arange(COUNT), world)
    said: dict[int, list[Any]] = world.said
    return said


@pytest.mark.parametrize(("slots", "few"), [(9, 3), pytest.param(8, 1, marks=pytest.mark.long)])
def test_neither_slots_nor_neighbours_nor_the_order_of_replies_change_a_bit(
    slots: int, few: int, params: Any, in_slots: Callable[..., None]
) -> None:
    """Kept caches: in fewer slots and with one for each; worlds that answer in any order and late; conversations alone
    and in another order, in which those of a group are no neighbours, so that each computes its prompt.
    """
    expected = told(COUNT, params, None, in_slots)
    assert sum(map(len, expected.values())) > 2 * COUNT
    for count, seed in ((slots, None), (COUNT, 1), (COUNT, 2)):
        worlds.assert_same(told(count, params, seed, in_slots), expected, bits=True)
    # XLA on a CPU computes exponentials of arrays of fewer rows than 8 by other code.
    worlds.assert_same(told(few, params, None, in_slots), expected, atol=2e-5)
    prompts, ids = make_prompts(), np.arange(COUNT)
    order = np.random.default_rng(0).permutation(COUNT)
    world = make_world()
    make_sampler(COUNT, in_slots).converse(params, [prompts[i] for i in order], KEY, ids[order], world)
    worlds.assert_same({i: world.said[row] for row, i in enumerate(order)}, expected, bits=True)
    for number in (0, 9):
        world = make_world()
        alone = [prompts[number]] * COUNT, KEY, np.array([number, *range(50, 49 + COUNT)])
        make_sampler(COUNT, in_slots).converse(params, *alone, world)
        worlds.assert_same({number: world.said[0]}, {number: expected[number]}, bits=True)


def test_a_slot_is_never_idle_while_a_conversation_waits(
    params: Any, in_slots: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[tuple[int, int]] = []
    begin = Schedule._begin_turns

    def spy(self: Schedule) -> None:
        begin(self)
        running.append((int(self.slots.active.sum()), len(self.waiting)))

    monkeypatch.setattr(Schedule, "_begin_turns", spy)
    for seed in (None, 7):
        running.clear()
        world = make_world(seed)
        make_sampler(3, in_slots).converse(params, make_prompts(), KEY, None, world)
        assert len(running) > 10
        assert {active for active, waiting in running if waiting} == {3}


@pytest.mark.parametrize(
    "axes", [{"data": 1}, pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.long)], ids=str
)
def test_nothing_compiles_after_warm_up(
    axes: dict[str, int], params: Any, in_slots: Callable[..., None]
) -> None:
    mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    params = jax.device_put(params, DEFINITION.shardings(mesh))
    make_sampler(3, in_slots, mesh=mesh).converse(params, make_prompts()[:1], KEY, None, make_world())
    options = OPTIONS.model_copy(update={"temperature": 0.83})
    sampler = make_sampler(5, in_slots, options, mesh)
    with compilations() as compiled:
        sampler.warm_up(params, [5, LONGEST_PROMPT])
        sampler._ahead.wait_for_all()
        ahead = len(compiled)
        sampler.converse(params, make_prompts(), jax.random.key(9), None, make_world())
    assert ahead
    assert compiled[ahead:] == []


@pytest.mark.parametrize("axes", [{"data": 1}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_the_programs_of_a_check_are_those_that_are_compiled(
    axes: dict[str, int], in_slots: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slots(4)
    mesh = make_mesh(**axes, devices=jax.devices()[: 8 if len(axes) > 1 else 1])
    lengths = {"max_prompt_length": LONGEST_PROMPT, "conversation_length": FOLLOWING}
    counts = {"num_generations": 5, "prompts_per_call": 2}
    sampler = ConversationSampler(samplers.inputs(DEFINITION, mesh, options=OPTIONS, **counts, **lengths))
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        DEFINITION.abstract_params(),
        DEFINITION.shardings(mesh),
    )
    lowered: dict[Any, str] = {}
    monkeypatch.setattr(sampler._ahead, "compile", lambda name, it: lowered.update({name: it.as_text()}))
    sampler.warm_up(shapes, [LONGEST_PROMPT])
    programs = sampling_programs(sampler, shapes, 4)
    assert [program.work for program in programs][-2:] == ["read", "sample"]
    assert (
        sum(program.calls * program.tokens for program in programs if program.work == "sample")
        == 20 * FOLLOWING
    )
    assert [program.name for program in programs if program.lower().as_text() not in lowered.values()] == []


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("alternatives", [None, 4])
def test_the_programs_lower_for_accelerators_in_bfloat16(platform: str, alternatives: int | None) -> None:
    definition = defined(CONFIG, "lm").computing(dtype="bfloat16")
    mesh = make_mesh(devices=jax.devices()[:1])
    program = turns.TurnsProgram(
        definition, OPTIONS, mesh, (3,), 16, turns.cache_length(300), "threefry2x32", False, alternatives
    )
    weights = placement.abstract_weights(definition, mesh, shared=False)
    cache, seen = turns.begin.eval_shape(weights, program=program)
    slots, key = turns.empty_slots(program), np.zeros(2, np.uint32)
    traced = [turns.decode.trace(weights, cache, seen, slots, key, None, np.int32(9), program=program)]
    fed = turns.padded_fed(program, 2, 64)
    if alternatives is None:
        traced += [
            turns.extend.trace(weights, cache, fed, program=program),
            turns.copy.trace(cache, turns.padded_copies(program), program=program),
        ]
    else:
        rows = packed.padded_packed(program)
        made = packed.prefill.eval_shape(weights, rows, program=program)
        traced += [
            turns.read.trace(weights, cache, fed, fed.tokens, program=program),
            packed.prefill.trace(weights, rows, program=program),
            packed.place.trace(cache, made, packed.padded_pieces(program), program=program),
        ]
    for each in traced:
        assert "bf16" in each.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("start", [0, 5, 90])
@pytest.mark.parametrize("count", [1, 16, 17, 100, 700])
def test_chunks_cover_what_is_new_and_stay_in_the_cache(start: int, count: int) -> None:
    end = start + count
    length = turns.cache_length(end + 1)
    conversation = Conversation(0, np.zeros(end + 1, np.int32), end + 9, None, 1)
    conversation.fed = start
    chunks = [size for size in turns.CHUNKS if size <= length]
    covered = start
    for at, size in conversation.pieces(end, chunks, length):
        assert at == covered
        assert at + size <= length
        covered = min(at + size, end)
    assert covered == end == conversation.fed


def plan(memory: int | None, conversations: int = 64) -> placement.Room:
    return placement.plan_conversations(
        DEFINITION, planned_mesh(1), [1], memory=memory, conversations=conversations, length=2048
    )


def test_as_many_slots_as_have_the_memory() -> None:
    assert plan(None).slots == placement.SLOTS["cpu"]
    per_slot = cache_bytes(DEFINITION, 1, 2048)
    weights = placement.prepared_bytes(DEFINITION)
    for slots in (1, 7, 40):
        room = plan(weights + 2 * slots * per_slot)
        assert room.bytes is not None
        assert room.bytes <= weights + 2 * slots * per_slot
        assert slots <= room.slots <= 2 * slots
    assert plan(10**12).slots == 64


def test_free_slots_are_dealt_out_evenly_and_neighbours_stay_together() -> None:
    mesh = make_mesh(data=4, devices=jax.devices()[:4])
    program = turns.TurnsProgram(DEFINITION, OPTIONS, mesh, (), 3, 64, "threefry2x32", False)

    no_devices: Any = SimpleNamespace(program=program)
    schedule = Schedule(no_devices, [], np.zeros(0, np.uint32), make_world())
    assert schedule._deal(8) == [0, 1, 3, 4, 6, 7, 9, 10]
    assert schedule._deal(99) == list(range(12))
    for slot in (0, 1, 4):
        schedule.holders[slot] = Conversation(slot, np.zeros(1, np.int32), 9, None, 1)
    assert schedule._deal(5) == [3, 6, 7, 9, 10]


def test_a_turn_whose_logits_are_not_finite_is_an_error_that_names_what_it_continued(
    params: Any, in_slots: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = make_sampler(2, in_slots)

    class Overflows:
        looks_ahead = False

        def __init__(self, *_: Any) -> None:
            self.program = sampler.program

        def grow(self, entries: int) -> None: ...

        def cut(self, entries: int) -> bool:
            return False

        def feed(self, pieces: Any, own: Any = None) -> None: ...

        def copy(self, pairs: Any) -> None: ...

        def note(self, contexts: Any) -> None: ...

        def decode(self, slots: Any, steps: int, own: Any = None) -> turns.Decoded:
            tokens, each = np.zeros((turns.STEPS, 2), np.int32), np.ones(2, np.int32)
            return turns.Decoded(tokens, np.full(tokens.shape, np.nan, np.float32), each, each, each, ())

    monkeypatch.setattr("rlhf_core.sampling.sampler.Devices", Overflows)
    bad = {**params, "norm": {"weight": params["norm"]["weight"] * np.nan}}
    with pytest.raises(InputError, match=r"the policy: .*'model\.norm\.weight' holds 16 of 16"):
        sampler.converse(bad, [np.arange(4, 9)], KEY, None, make_world())
    with pytest.raises(NonFiniteError, match="Computed by itself it is finite"):
        sampler.converse(params, [np.arange(4, 9)], KEY, None, make_world())


@pytest.mark.parametrize(
    ("added", "limit", "expected"),
    [(4, 9, 2), (5, 9, 1), (6, 9, None), (1, 1, 1), (1, 0, None), (1, 9, 3), (2, 3, 3)],
)
@pytest.mark.parametrize("replaces", [False, True])
def test_a_turn_has_room_for_one_token_at_least(
    added: int, limit: int, expected: int | None, replaces: bool
) -> None:
    """In a conversation of at most 10 tokens that has 4, with turns of at most 3."""
    conversation = Conversation(0, np.zeros(4, np.int32), 10, 1, 1)
    reply = Continuation(0, np.ones(added + 4 * replaces, np.int32), limit, replaces)
    if expected is None:
        with pytest.raises(ValueError, match="conversation 0: a turn of at most"):
            conversation.continue_with(reply, 3)
        return
    conversation.continue_with(reply, 3)
    assert (conversation.limit, conversation.turn, len(conversation.context)) == (expected, 1, 4 + added)
    assert (conversation.group, conversation.base) == ((None, 3 + added) if replaces else (1, 3))
