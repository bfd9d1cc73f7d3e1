"""Schedule conversations with an environment: which has which slot, what the slot is fed, and when it decodes.

Everything that is computed for a conversation depends only on its own tokens: not on the others, its slot, or
when its environment answers. Every process of a run goes through the same steps.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from rlhf_core.contracts import Beginning, Continuation, SamplerFunction, TurnSettings, Weights, World
from rlhf_core.sampling.devices import Devices
from rlhf_core.sampling.next_token import ENDED
from rlhf_core.sampling.packed import PACKED, Prefilled
from rlhf_core.sampling.turns import STEPS, STOP_IDS, empty_slots, turn_number

STEPS_WAITING = 16
"""The most tokens per turn that are decoded before the world is asked for replies that are outstanding."""


NO_SLOT = -1


class NonFiniteTurnError(Exception):
    """A token was chosen from logits that are not finite."""

    def __init__(self, conversation: int, context: np.ndarray) -> None:
        self.conversation, self.context = conversation, context


@dataclass
class Conversation:
    """A conversation that is not over."""

    number: int
    context: np.ndarray
    """int32, everything said so far."""
    longest: int
    """Tokens that the context may have."""
    group: Any
    """The number of its prompt; None once another context has replaced it."""
    limit: int
    """The most tokens of the turn."""
    settings: TurnSettings | None = None
    """How its turn is sampled; None: as all are."""
    turn: int = 0
    base: int = 0
    """Tokens of the prompt, or of the context that replaced it, but its last: they are fed by themselves, because the
    conversations of a group have them in common."""
    fed: int = 0
    """Tokens at the start of the context that its slot's cache has."""
    slot: int = NO_SLOT
    prefilled: Prefilled | None = None
    """The base, if it was computed before there was a slot for it."""
    written: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """The turn so far: tokens and log-probabilities."""

    def __post_init__(self) -> None:
        self.base = len(self.context) - 1

    @property
    def weights(self) -> Weights | None:
        """The weights that it is sampled with; None: the usual ones."""
        return None if self.settings is None else self.settings.weights

    @property
    def is_read(self) -> bool:
        """Whether its world is told what the policy thinks of its context."""
        return self.settings is not None and self.settings.reads_context

    def finish_turn(self) -> tuple[np.ndarray, np.ndarray]:
        """Add the turn to the context, and return it: int32 and float32 [n]."""
        tokens, logps = (np.concatenate(parts) for parts in zip(*self.written, strict=True))
        self.written = []
        self.fed = len(self.context) + len(tokens) - 1  # the last token was not fed
        self.context = np.concatenate([self.context, tokens])
        return tokens, logps

    def continue_with(self, reply: Continuation, longest_turn: int) -> None:
        """Begin the next turn. Raises ValueError for a continuation after which no token fits."""
        assert reply.tokens is not None
        added = np.asarray(reply.tokens, np.int32)
        if reply.replaces:
            self.context, self.group, self.fed = added, None, 0
            self.base = len(added) - 1
        else:
            self.context = np.concatenate([self.context, added])
        room = self.longest - len(self.context)
        if room < 1 or reply.limit < 1 or not len(self.context):
            raise ValueError(
                f"conversation {self.number}: a turn of at most {reply.limit} tokens after a context of "
                f"{len(self.context)}; the context must have tokens, the turn at least one, and both together at "
                f"most {self.longest}"
            )
        self.limit = min(reply.limit, longest_turn, room)
        self.turn += 1

    def pieces(self, end: int, chunks: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
        """Yield (start, chunk) of what its slot is fed up to `end`. length: of the cache, in which every chunk fits."""
        while self.fed < end:
            fitting = [size for size in chunks if self.fed + size <= length]
            chunk = next((size for size in fitting if size >= end - self.fed), fitting[-1])
            yield self.fed, chunk
            self.fed = min(self.fed + chunk, end)


class Schedule:
    """Runs the conversations of one call.

    Where every conversation has a slot, caches stay while the world thinks. Otherwise a conversation keeps its slot
    until it is over if the world is quick, and else gives it up at the end of each turn; the next turn then feeds
    everything that was said.
    """

    def __init__(
        self, devices: Devices, conversations: Sequence[Conversation], ids: np.ndarray, world: World
    ):
        self.devices = devices
        self.world: Any = world
        program = devices.program
        self.longest_turn = program.options.max_completion_length
        self.chunks, self.length = program.chunks, program.length
        count = program.shards * program.slots
        self.keeps_slots = len(conversations) <= count or bool(getattr(world, "quick", False))
        self.waiting, self.resumed = deque(conversations), list[Conversation]()
        self.answering: dict[int, Conversation] = {}
        self.holders: list[Conversation | None] = [None] * count
        self.groups: list[Any] = [None] * count
        """The prompt that the cache of each slot begins with."""
        self.slots: Any = empty_slots(program)
        self.ids = ids

    def run(self) -> None:
        """Run them until all are over."""
        while self.waiting or self.resumed or self.answering or self.slots.active.any():
            if self.answering:
                starts = self.waiting and None in self.holders
                busy = self.slots.active.any() or self.resumed or starts
                for reply in self.world.replies(wait=not busy):
                    self.take(reply)
            self._step()

    def step(self) -> bool:
        """Ask an `OpenWorld` what there is to do, and do a little of it; return whether there was anything."""
        for reply in self.world.replies(wait=False):
            self.take(reply)
        return self._step()

    def _step(self) -> bool:
        self._begin_turns()
        busy = bool(self.slots.active.any())
        if busy:
            self._look_ahead()
            self._decode()
        return busy

    def forget_prompts(self) -> None:
        """Let no later conversation begin with a cache that there is now, as when the weights have changed."""
        self.groups = [None] * len(self.groups)
        for conversation in self.waiting:
            conversation.prefilled = None

    def feed_again(self) -> None:
        """Compute the caches of the conversations that run again, as when the weights have changed."""
        self.forget_prompts()
        ends = []
        for slot in np.flatnonzero(self.slots.active):
            conversation = self.holders[slot]
            assert conversation is not None
            context = np.concatenate([conversation.context, *(tokens for tokens, _ in conversation.written)])
            whole = replace(conversation, context=context, fed=0, settings=None)
            if conversation.settings is not None:
                whole.settings = conversation.settings._replace(reads_context=False)
            ends.append((whole, len(context) - 1))
        self._feed(ends)

    def _open(self, reply: Beginning) -> None:
        """Take a conversation that the world begins."""
        context = np.asarray(reply.tokens, np.int32)
        limit = min(reply.limit, self.longest_turn)
        longest = len(context) + limit
        group = None if reply.settings.reads_context else reply.group
        self.waiting.append(
            Conversation(reply.conversation, context, longest, group, limit, settings=reply.settings)
        )

    def _close(self, number: int) -> None:
        """End a conversation with settings, if it is not over yet."""
        for conversation in [*self.waiting, *filter(None, self.holders)]:
            if conversation.number == number:
                if conversation.slot == NO_SLOT:
                    self.waiting.remove(conversation)
                else:
                    self.slots.active[conversation.slot] = False
                    self._release(conversation)

    def take(self, reply: Beginning | Continuation) -> None:
        """Continue, begin or end a conversation."""
        if isinstance(reply, Beginning):
            self._open(reply)
            return
        conversation = self.answering.pop(reply.conversation, None)
        if conversation is None and reply.tokens is None and self.slots.settings is not None:
            self._close(reply.conversation)
            return
        if conversation is None:
            raise ValueError(
                f"conversation {reply.conversation}: a continuation must follow a turn of the policy"
            )
        if reply.tokens is None:
            self._release(conversation)
            return
        conversation.continue_with(reply, self.longest_turn)
        if conversation.slot == NO_SLOT:
            self.waiting.append(conversation)
        else:
            self.resumed.append(conversation)

    def _release(self, conversation: Conversation) -> None:
        if conversation.slot != NO_SLOT:
            self.holders[conversation.slot] = None
            conversation.slot = NO_SLOT

    def _begin_turns(self) -> None:
        """Give free slots to conversations that wait, feed all whose turn it is, and set their slots up."""
        begun = [*self._seat_waiting(), *self.resumed]
        self.resumed = []
        if not begun:
            return
        self._feed_bases(begun)
        self._feed([(conversation, len(conversation.context) - 1) for conversation in begun])
        self.devices.note([(conversation.slot, conversation.context) for conversation in begun])
        for conversation in begun:
            self._set_up(conversation)
        if self.devices.program.has_states:
            # Decoding changes them, and no slot begins with its prompt's any more.
            self.groups = [None] * len(self.groups)

    def _seat_waiting(self) -> list[Conversation]:
        """Give free slots to conversations that wait; a slot that began with the same prompt has it already."""
        placed = [(self.waiting.popleft(), slot) for slot in self._deal(len(self.waiting))]
        for conversation, slot in placed:
            conversation.slot, conversation.fed = slot, 0
            self.holders[slot] = conversation
            if conversation.group is not None and self.groups[slot] == conversation.group:
                conversation.fed = conversation.base
        return [conversation for conversation, _ in placed]

    def _feed_bases(self, begun: Sequence[Conversation]) -> None:
        """Feed what the conversations of a group begin with, once for each shard, and copy it to the group's others."""
        for conversation in begun:
            if not conversation.fed:
                self.groups[conversation.slot] = None
        first: list[Conversation] = []
        alike: list[tuple[Conversation, int]] = []
        sources: dict[tuple[int, int | None], int] = {
            (self._shard(slot), group): slot for slot, group in enumerate(self.groups) if group is not None
        }
        for conversation in begun:
            if conversation.fed:
                continue
            self.groups[conversation.slot] = group = conversation.group
            source = sources.setdefault((self._shard(conversation.slot), group), conversation.slot)
            if group is None or source == conversation.slot:
                first.append(conversation)
            else:
                alike.append((conversation, source))
        self._feed([(conversation, conversation.base) for conversation in first])
        self.devices.copy(
            [(conversation.slot, source) for conversation, source in alike if conversation.base]
        )
        for conversation, _ in alike:
            conversation.fed = conversation.base

    def _look_ahead(self) -> None:
        """Prefill what begins next, while others decode."""
        if not self.devices.looks_ahead:
            return
        known = set(self.groups)
        ahead: dict[Weights | None, list[Conversation]] = {}
        for conversation in itertools.islice(self.waiting, len(self.holders)):
            fits = 0 < conversation.base <= PACKED and not conversation.is_read
            if fits and (conversation.group is None or conversation.group not in known):
                known.add(conversation.group)
                if conversation.prefilled is None:
                    ahead.setdefault(conversation.weights, []).append(conversation)
        for weights, same in ahead.items():
            contexts = [conversation.context[: conversation.base] for conversation in same]
            for conversation, prefilled in zip(
                same, self.devices.prefill_ahead(contexts, weights), strict=True
            ):
                conversation.prefilled = prefilled

    def _shard(self, slot: int) -> int:
        return slot // self.devices.program.slots

    def _deal(self, count: int) -> list[int]:
        """Choose free slots for the first of `count` conversations: as many of each shard are busy, and neighbours,
        which are of one group, share a shard.
        """
        size = self.devices.program.slots
        free: list[list[int]] = [[] for _ in range(self.devices.program.shards)]
        for slot, holder in enumerate(self.holders):
            if holder is None:
                free[slot // size].append(slot)
        share = [0] * len(free)
        for _ in range(min(count, sum(map(len, free)))):
            share[max(range(len(free)), key=lambda i: len(free[i]) - share[i])] += 1
        return [slot for slots, n in zip(free, share, strict=True) for slot in slots[:n]]

    def _feed(self, ends: Sequence[tuple[Conversation, int]]) -> None:
        """Feed conversations' contexts up to an end each, a chunk of every conversation at a time."""
        ways = dict.fromkeys((conversation.weights, conversation.is_read) for conversation, _ in ends)
        for weights, reads in ways:
            same = [each for each in ends if (each[0].weights, each[0].is_read) == (weights, reads)]
            self._feed_with(weights, same, reads)

    def _feed_with(
        self, weights: Weights | None, ends: Sequence[tuple[Conversation, int]], reads: bool
    ) -> None:
        if self.devices.program.packs and not reads:
            self._feed_packed(weights, [(c, end) for c, end in ends if c.fed == 0 < end <= PACKED])
        pending = [(c, end, c.pieces(end, self.chunks, self.length)) for c, end in ends]
        while pending:
            pieces: list[Any] = []
            left = []
            for conversation, end, rest in pending:
                piece = next(rest, None)
                if piece is not None:
                    start, chunk = piece
                    tokens = conversation.context[start : min(start + chunk, end)]
                    pieces.append((conversation.slot, chunk, start, tokens))
                    left.append((conversation, end, rest))
            pending = left
            if weights is not None and reads:
                self._read_pieces([conversation for conversation, *_ in left], pieces, weights)
            else:
                self.devices.feed(pieces, weights)

    def _feed_packed(self, weights: Weights | None, short: Sequence[tuple[Conversation, int]]) -> None:
        """Feed short contexts from their start, together, or the caches of those that were fed before."""
        self.devices.place([(c.slot, c.prefilled) for c, _ in short if c.prefilled])
        missing = [(c.slot, c.context[:end]) for c, end in short if not c.prefilled]
        self.devices.prefill(missing, weights)
        for conversation, end in short:
            conversation.fed = end

    def _read_pieces(
        self, conversations: Sequence[Conversation], pieces: Sequence[Any], weights: Weights
    ) -> None:
        """Feed pieces, and tell the world the log-probabilities of the tokens that follow each of theirs."""
        targets = [
            conversation.context[start + 1 : start + 1 + len(tokens)]
            for conversation, (_, _, start, tokens) in zip(conversations, pieces, strict=True)
        ]
        judged = self.devices.read([(*piece, t) for piece, t in zip(pieces, targets, strict=True)], weights)
        for conversation, (ranks, logps, ids, best) in zip(conversations, judged, strict=True):
            self.world.read(conversation.number, logps, ranks, (ids, best))

    def _set_up(self, conversation: Conversation) -> None:
        slot, slots = conversation.slot, self.slots
        conversation.prefilled = None
        slots.active[slot] = True
        slots.last[slot] = conversation.context[-1]
        slots.position[slot] = len(conversation.context) - 1
        slots.drawn[slot] = slots.matched[slot] = 0
        slots.limit[slot] = conversation.limit
        if conversation.settings is not None:
            self._set_up_own(slot, conversation.settings)
            return
        slots.ids[slot] = self.ids[conversation.number]
        slots.turn[slot] = conversation.turn

    def _set_up_own(self, slot: int, given: TurnSettings) -> None:
        own, everything = self.slots.settings, self.devices.program.definition.vocab_size
        own.keys[slot] = given.key
        own.temperature[slot], own.top_p[slot], own.min_p[slot] = given.temperature, given.top_p, given.min_p
        own.top_k[slot] = min(given.top_k or everything, everything)
        own.stop_ids[slot] = [*given.stop_ids, *[-1] * (STOP_IDS - len(given.stop_ids))]
        own.alternatives[slot] = given.alternatives

    def _decode(self) -> None:
        """Decode for a while with the weights of each conversation."""
        holders = [self.holders[slot] for slot in np.flatnonzero(self.slots.active)]
        for weights in dict.fromkeys(holder.weights for holder in holders if holder is not None):
            self._decode_with(weights)

    @property
    def _steps(self) -> int:
        """The most tokens of each turn that are decoded before the world is asked again."""
        steps: int = getattr(self.world, "steps", STEPS_WAITING if self.answering else STEPS)
        return steps

    def _decode_with(self, weights: Weights | None) -> None:
        """Decode for a while, and submit the turns that have ended, by the number of their conversations."""
        slots = self.slots
        mine = [holder is not None and holder.weights is weights for holder in self.holders]
        active = slots.active & np.array(mine)
        decoded = self.devices.decode(slots._replace(active=active), self._steps, weights)
        ended = []
        for slot in np.flatnonzero(active):
            conversation = self.holders[slot]
            assert conversation is not None
            count = int(decoded.drawn[slot] - slots.drawn[slot])
            if count:
                tokens, logps = decoded.tokens[:count, slot], decoded.logps[:count, slot]
                if not np.isfinite(logps).all():
                    if conversation.settings is None:
                        raise NonFiniteTurnError(conversation.number, conversation.context)
                    self._close(conversation.number)
                    self.world.failed(conversation.number)
                    continue
                conversation.written.append((tokens, logps))
                if conversation.settings is not None:
                    likeliest = tuple(each[:count, :, slot] for each in decoded.likeliest)
                    self.world.sampled(conversation.number, tokens, logps, likeliest)
                slots.last[slot] = tokens[-1]
            slots.position[slot] += count
            if decoded.ends[slot]:
                slots.active[slot] = False
                ended.append((conversation, bool(decoded.ends[slot] == ENDED)))
        slots.drawn[:], slots.matched[:] = decoded.drawn, decoded.matched
        for conversation, finished in sorted(ended, key=lambda each: each[0].number):
            tokens, logps = conversation.finish_turn()
            self.answering[conversation.number] = conversation
            if not self.keeps_slots:
                self._release(conversation)
            self.world.submit(conversation.number, tokens, logps, finished)


def begin_conversations(
    prompts: Sequence[np.ndarray], conversation_length: int, longest_turn: int
) -> list[Conversation]:
    """Make a conversation of each prompt; equal neighbours are a group."""
    conversations: list[Conversation] = []
    group = -1
    for number, prompt in enumerate(prompts):
        context = np.asarray(prompt, np.int32)
        if number == 0 or not np.array_equal(context, conversations[-1].context):
            group += 1
        limit = min(longest_turn, conversation_length)
        conversations.append(Conversation(number, context, len(context) + conversation_length, group, limit))
    return conversations


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

    sampler: with num_generations 1; the prompts of a call are everything that was said, so its max_prompt_length
    covers a prompt and a conversation. Other arguments, turns and errors are as in `ConversationSampler.converse`.
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
