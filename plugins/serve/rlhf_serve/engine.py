"""The thread in which everything is computed: it samples for all requests together, and scores, and changes weights.

The event loop hands it completions and calls; after each step, it gets back all tokens of that step together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core.contracts import Beginning, Continuation, TurnSettings
from rlhf_core.errors import RunError
from rlhf_serve.pending import PendingCompletion

if TYPE_CHECKING:
    from rlhf_core.contracts import Weights
    from rlhf_core.models import Model
    from rlhf_core.sampling import ConversationSampler

STEPS = (4, 32)
"""The fewest and most tokens of each completion that are sampled before the event loop sees them and requests begin."""
STEP_SECONDS = 0.1
"""How long that may take, where the fewest take less."""
IDLE_SECONDS = 60.0
FIRST_VERSION = "default"
"""What the weights are called until somebody names them, as in vLLM."""


class Policy:
    """A language model that completes: the `OpenWorld` of its sampler. Belongs to the engine's thread."""

    def __init__(self, model: Model, sampler: ConversationSampler) -> None:
        """model: with its parameters, which are laid out for the sampler here."""
        self.model, self.sampler = model, sampler
        self.weights = sampler.place(model.params)
        self.version = FIRST_VERSION
        self.schedule = sampler.open(self.weights, self)
        self.running: dict[int, PendingCompletion] = {}
        self.incoming: deque[PendingCompletion] = deque()
        self.admitted: deque[PendingCompletion] = deque()
        self.ending: deque[int] = deque()
        self.steps = STEPS[0]
        self._tokens = 0
        """Of the completion that got the most, in the current step."""
        self.holds = False
        """Whether completions that arrive have to wait."""
        self.events: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What the event loop has to be told."""

    def warm_up(self) -> None:
        """Sample one token, for which every program is compiled."""
        settings = TurnSettings(self.weights, turn_key(0, 0))
        self.schedule.take(Beginning(-1, np.zeros(2, np.int32), 1, settings))
        while self.schedule.step() or self.ending:
            pass

    def admit(self) -> None:
        """Let everything begin that has arrived."""
        while self.incoming:
            pending = self.incoming.popleft()
            if not pending.over:
                self.running[pending.number] = pending
                self.admitted.append(pending)

    def replies(self, *, wait: bool) -> Sequence[Any]:
        """Begin the completions that were admitted, and end those that are over."""
        if not self.holds:
            self.admit()
        begun = [self._beginning(pending) for pending in self.admitted if pending.number in self.running]
        self.admitted.clear()
        if len(begun) == len(self.running):  # nothing else runs: first tokens come soon
            self.steps = STEPS[0]
        ends = []
        while self.ending:
            number = self.ending.popleft()
            self.running.pop(number, None)
            ends.append(Continuation(number, None))
        return [*begun, *ends]

    def _beginning(self, pending: PendingCompletion) -> Beginning:
        generation = pending.generation
        settings = TurnSettings(
            weights=pending.weights,
            key=turn_key(generation.seed, pending.index),
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            min_p=generation.min_p,
            stop_ids=generation.stop_ids,
            alternatives=bool(generation.likeliest),
            reads_context=pending.reads_prompt,
        )
        return Beginning(pending.number, pending.prompt, generation.limit, settings, pending.group)

    def sampled(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, likeliest: Any) -> None:
        """Pass tokens on."""
        self._tokens = max(self._tokens, len(tokens))
        pending = self.running.get(conversation)
        if pending:
            self.events.append((pending.receive, (tokens, logps, likeliest, self.version)))

    def read(
        self,
        conversation: int,
        logps: np.ndarray,
        ranks: np.ndarray,
        likeliest: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """Pass on what the policy thinks of a prompt."""
        pending = self.running.get(conversation)
        if pending:
            self.events.append((pending.read, (logps, ranks, *likeliest)))

    def submit(self, conversation: int, tokens: np.ndarray, logps: np.ndarray, finished: bool) -> None:
        """Note that a completion has ended by itself."""
        self.ending.append(conversation)
        pending = self.running.get(conversation)
        if pending:
            self.events.append((pending.finish, ("stop" if finished else "length",)))

    def step(self) -> bool:
        """Sample a little, about as long as `STEP_SECONDS`; return whether there was anything to do."""
        self._tokens, start = 0, time.monotonic()
        busy = self.schedule.step()
        if self._tokens:
            fitting = int(STEP_SECONDS * self._tokens / (time.monotonic() - start))
            self.steps = max(STEPS[0], min(fitting, STEPS[1]))
        return busy or bool(self.ending)

    def failed(self, conversation: int) -> None:
        """Note that a completion cannot go on."""
        pending = self.running.pop(conversation, None)
        if pending:
            error = RunError(
                "the distribution of a next token is not finite: the weights hold NaN or infinity, or overflow"
            )
            self.events.append((pending.fail, (error,)))

    def abort(self) -> None:
        """End everything that was admitted or has arrived, with what it has."""
        self.admit()
        for number, pending in self.running.items():
            self.ending.append(number)
            self.events.append((pending.finish, ("abort",)))

    def keep_only(self, weights: Sequence[Weights]) -> None:
        """End what has other weights than these, with what it has: their versions have no name any more."""
        kept = {each.number for each in weights}
        for pending in (*self.running.values(), *self.incoming):
            if pending.weights.number not in kept:
                self.ending.append(pending.number)
                self.events.append((pending.finish, ("abort",)))

    def fail(self, error: Exception) -> None:
        """End everything that was admitted or has arrived by an error."""
        self.admit()
        for pending in self.running.values():
            self.events.append((pending.fail, (error,)))
        self.running.clear()
        self.schedule = self.sampler.open(self.weights, self)


@jax.jit
def _fold(high: jax.Array, low: jax.Array, index: jax.Array) -> jax.Array:
    """Make a turn's key of both halves of a seed and an index."""
    key = jax.random.key(low)
    longer = jax.random.key_data(jax.random.fold_in(key, high))
    data = jax.numpy.where(high > 0, longer, jax.random.key_data(key))
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(data), index))


def turn_key(seed: int, index: int) -> np.ndarray:
    """Make the key of completion `index` of a request: for seeds below 2**32, the one that `rlhf generate` has."""
    seed %= 2**64
    halves = (np.uint32(seed >> 32), np.uint32(seed % 2**32), np.uint32(index))
    return np.asarray(_fold(*halves))


class Engine:
    """Runs policies, and calls that are handed to it, in one thread."""

    def __init__(self, policies: Sequence[Policy] = ()) -> None:
        self.policies = list(policies)
        self.frozen = False
        """Whether nothing is sampled at all."""
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._idle: list[Future[None]] = []
        self._wake = threading.Event()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin. loop: gets what is sampled."""
        self._loop = loop
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self, policy: Policy, completions: Sequence[PendingCompletion]) -> None:
        """Hand over the completions of one request."""
        policy.incoming.extend(completions)
        self._wake.set()

    def end(self, policy: Policy, pending: PendingCompletion) -> None:
        """Free what a completion holds."""
        policy.ending.append(pending.number)
        self._wake.set()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Compute something in the engine's thread, between two steps."""
        future: Future[Any] = Future()
        self._calls.append((future, function))
        self._wake.set()
        return await asyncio.wrap_future(future)

    def pause(self, mode: str) -> Future[None]:
        """Stop sampling; called in the engine's thread. mode: "abort", "wait" or "keep", as vLLM has them.

        The future is done once nothing is sampled.
        """
        paused: Future[None] = Future()
        for policy in self.policies:
            if mode == "abort":
                policy.abort()
            elif mode == "wait":
                policy.admit()
            policy.holds = True
        self.frozen = mode == "keep"
        if mode == "wait":
            self._idle.append(paused)
        else:
            paused.set_result(None)
        return paused

    def resume(self) -> None:
        """Sample again."""
        self.frozen = False
        for policy in self.policies:
            policy.holds = False
        self._wake.set()

    def load(self) -> tuple[int, int]:
        """Count the completions that have a slot, and those that wait for one."""
        running = sum(int(policy.schedule.slots.active.sum()) for policy in self.policies)
        completions = [
            each for policy in self.policies for each in (*policy.running.values(), *policy.incoming)
        ]
        everything = sum(not pending.over for pending in completions)
        return running, max(everything - running, 0)

    @property
    def paused(self) -> bool:
        return any(policy.holds for policy in self.policies)

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            busy = bool(self._calls)
            while self._calls:
                self._answer(*self._calls.popleft())
            if not self.frozen:
                for policy in self.policies:
                    busy |= self._step(policy)
            if self._idle and not any(policy.running for policy in self.policies):
                while self._idle:
                    self._idle.pop().set_result(None)
            self._tell()
            if not busy:
                self._wake.wait(IDLE_SECONDS)

    def _step(self, policy: Policy) -> bool:
        try:
            return policy.step()
        except (
            Exception
        ) as error:  # of the device, such as too little memory: what ran is lost, the rest is not
            policy.fail(error)
            return True

    def _answer(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    def _tell(self) -> None:
        events = [event for policy in self.policies for event in policy.events]
        for policy in self.policies:
            policy.events.clear()
        if events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for function, arguments in events:
        function(*arguments)
