"""Run the episodes of one rollout: keep what was said, have the environments answer, and end them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.contracts import Continuation, Rollouts, Turn
from rlhf_core.environments.calls import (
    EnvironmentCalls,
    EpisodeError,
    checked_messages,
    checked_turn,
    plain_metrics,
)
from rlhf_core.errors import InputError, RunError
from rlhf_core.runtime.agreement import broadcast_text
from rlhf_core.workers.event_loop import call_now, outcome_of

if TYPE_CHECKING:
    from rlhf_core.environments.conversation import ConversationEncoder
    from rlhf_core.environments.parsing import CallParser

Ints = NDArray[np.int32]
NOTHING = np.zeros(0, np.int32)


class TurnRecord(NamedTuple):
    """A turn of the policy: its tokens are `start` to `end` of the episode's, end excluded.

    context: int32 [n], all that it continues, where that is not the episode's prompt and earlier tokens; else None.
    message: its number among the messages after the prompt, from 0; None after a restore.
    """

    start: int
    end: int
    context: Ints | None = None
    message: int | None = None


@dataclass
class Episode:
    """One episode. Its tokens follow its prompt; `written` marks those of the policy."""

    row: Mapping[str, Any]
    seed: int
    place: str
    environment: Any = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    first: int = 0
    """How many messages it began with."""
    prompt: Ints = field(default_factory=NOTHING.copy)
    tokens: Ints = field(default_factory=NOTHING.copy)
    logps: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    written: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    turns: list[TurnRecord] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    """One per turn that the environment answered."""
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    failure: str | None = None
    finished: bool = False
    """Whether the environment ended it, after a turn that was not cut."""
    cut: bool = False
    """Whether a limit of turns, tokens or seconds ended it."""
    ended_by: int | None = None
    """The stop token that the last turn ended with; None: it was cut."""
    context: Ints | None = None
    """What the next turn continues, where the history is encoded again."""
    began: float = 0.0

    @property
    def reward(self) -> float:
        """The sum of its turns' rewards; NaN where there are none."""
        given = [reward for reward in self.rewards if reward is not None]
        return float(sum(given)) if given else float("nan")

    def append(self, tokens: Ints, logps: NDArray[np.float32], *, written: bool) -> None:
        self.tokens = np.concatenate([self.tokens, tokens])
        self.logps = np.concatenate([self.logps, logps])
        self.written = np.concatenate([self.written, np.full(len(tokens), written)])


@dataclass(frozen=True)
class EpisodeSettings:
    """The environment of a stage, how its conversations become tokens, and how long they may be.

    length: the most tokens of an episode after its prompt; turn_length: of a turn of the policy.
    """

    calls: EnvironmentCalls
    encoder: ConversationEncoder
    parser: CallParser
    max_prompt_length: int
    length: int
    turn_length: int

    @property
    def one_row_per_turn(self) -> bool:
        """Whether every turn is a separate training row, whose prompt is everything before it."""
        return self.calls.options.history == "encoded_again"


class Episodes:
    """The `World` of one call of `converse`. Every process makes one; the first one calls the environments."""

    def __init__(self, settings: EpisodeSettings, episodes: Sequence[Episode], group: int) -> None:
        """Begin the episodes, those of a group adjacent. Raises RunError where one fails, with on_error "stop"."""
        self.settings, self.episodes = settings, episodes
        self.calls, self.encoder, self.length = settings.calls, settings.encoder, settings.length
        self.quick = self.calls.quick
        self._ready: list[Continuation] = []
        self._pending: dict[Future[Any], int] = {}
        self._calls_here = jax.process_index() == 0
        self._reset(group)
        self.running = [i for i, episode in enumerate(episodes) if episode.failure is None]
        """The episodes that began: conversation k of the call is episode running[k]."""

    @property
    def prompts(self) -> list[Ints]:
        """The prompts of the episodes that began."""
        return [self.episodes[i].prompt for i in self.running]

    def _reset(self, group: int) -> None:
        if self._calls_here:
            begun = [self._begin(episode) for episode in self.episodes]
            for episode, call in zip(self.episodes, begun, strict=True):
                episode.messages = self._checked(episode, "reset", call) or []
        self._share()
        for i, episode in enumerate(self.episodes):
            episode.first = len(episode.messages)
            if episode.failure is None:
                first = next(each for each in self.episodes[i - i % group :] if each.failure is None)
                self._encode_prompt(episode, first)

    def _begin(self, episode: Episode) -> Future[tuple[Any, Any]]:
        episode.began = time.monotonic()
        row = dict(episode.row)
        seed = episode.seed
        return call_now(lambda: self.calls.call(self.calls.make(), "reset", row, seed))

    def _encode_prompt(self, episode: Episode, first: Episode) -> None:
        """Encode the messages that an episode began with. first: of its group, whose prompt it shares."""
        try:
            if episode is not first:
                if episode.messages != first.messages:
                    raise EpisodeError(
                        "returned different messages from the first episode of its group, for the same row and seed"
                    )
                episode.prompt = first.prompt
                return
            prompt = self.encoder.prompt(episode.messages, tools=self.calls.tools)
            most = self.settings.max_prompt_length
            if len(prompt) > most:
                raise EpisodeError(
                    f"returned a prompt of {len(prompt):,} tokens, more than max_prompt_length={most:,}"
                )
            episode.prompt = prompt
        except (EpisodeError, InputError) as error:
            self._fail(episode, "reset", error)

    def _checked(self, episode: Episode, method: str, call: Future[tuple[Any, Any]]) -> Any:
        """Wait for a call, keep the environment that it leaves, and check what the method returned.

        Returns messages or a turn; None where the method raised or returned something else, so that the episode failed.
        """
        result = outcome_of(call)
        if not isinstance(result, BaseException):
            episode.environment, value = result
            try:
                if method == "reset":
                    return checked_messages(value, method)
                return checked_turn(value, sum(r for r in episode.rewards if r is not None))
            except Exception as error:
                result = error
        self._fail(episode, method, result)
        return None

    def _fail(self, episode: Episode, method: str, error: BaseException) -> None:
        episode.failure = f"{episode.place}: {self.calls.explain(method, error)}"
        if self.calls.options.on_error == "stop":
            raise RunError(episode.failure) from error

    def submit(self, conversation: int, tokens: NDArray[Any], logps: NDArray[Any], finished: bool) -> None:
        """Take a turn of the policy, and have the environment answer it."""
        episode = self.episodes[self.running[conversation]]
        start = len(episode.tokens)
        episode.append(np.asarray(tokens, np.int32), np.asarray(logps, np.float32), written=True)
        number = len(episode.messages) - episode.first
        episode.turns.append(TurnRecord(start, len(episode.tokens), episode.context, number))
        episode.ended_by = int(tokens[-1]) if finished else None
        episode.messages.append(self.settings.parser.message(tokens))
        if not self._calls_here:
            return
        call = self.calls.call(episode.environment, "step", dict(episode.messages[-1]))
        if call.done():
            self._answer(conversation, call)
        else:
            self._pending[call] = conversation

    def _answer(self, conversation: int, call: Future[tuple[Any, Any]]) -> None:
        """Make the continuation that follows from what `step` returned or raised."""
        episode = self.episodes[self.running[conversation]]
        reply = None
        turn = self._checked(episode, "step", call)
        if turn is not None:
            episode.rewards.append(turn.reward)
            episode.metrics.append(turn.metrics)
            try:
                reply = self._continue(conversation, episode, turn)
            except (EpisodeError, InputError) as error:
                self._fail(episode, "step", error)
        self._ready.append(reply or Continuation(conversation, None))

    def _continue(self, conversation: int, episode: Episode, turn: Turn) -> Continuation | None:
        """Return what the next turn continues; None where the episode is over."""
        if turn.done:
            episode.messages += [dict(message) for message in turn.messages]
            episode.finished = episode.ended_by is not None
            return None
        spent = time.monotonic() - episode.began
        limit = self.calls.options.max_seconds
        if len(episode.turns) >= self.calls.options.max_turns or (limit is not None and spent > limit):
            episode.cut = True
            return None
        added = [dict(message) for message in turn.messages]
        self._require_encodable(added)
        if self.settings.one_row_per_turn:
            tokens = self.encoder.prompt([*episode.messages, *added], tools=self.calls.tools)
            left = self.length - max(len(tokens) - len(episode.prompt), len(episode.tokens))
        else:
            tokens = self.encoder.observation(
                episode.messages,
                added,
                ended_by=episode.ended_by,
                tools=self.calls.tools,
            )
            left = self.length - len(episode.tokens) - len(tokens)
        if left < 1:
            episode.cut = True
            return None
        episode.messages += added
        return Continuation(
            conversation, tokens, min(left, self.settings.turn_length), self.settings.one_row_per_turn
        )

    def _require_encodable(self, added: Sequence[Mapping[str, Any]]) -> None:
        """Raise EpisodeError where the chat template rewrites its past when messages of these roles follow."""
        roles = sorted({str(message["role"]) for message in added})
        problem = self.encoder.problem(
            tools=self.calls.tools, roles=roles, encoded_again=self.settings.one_row_per_turn
        )
        if problem:
            raise EpisodeError(f"returned messages that cannot follow replies: {problem}")

    def replies(self, *, wait: bool) -> Sequence[Continuation]:
        """Return the answers that have arrived. wait: for at least one, if any is outstanding."""
        if self._calls_here:
            self._collect(block=wait)
        replies, self._ready = self._ready, []
        if jax.process_count() > 1:
            replies = _shared(replies)
        for conversation, tokens, _, replaces in replies:
            if tokens is None:
                continue
            episode = self.episodes[self.running[conversation]]
            if replaces:
                episode.context = np.asarray(tokens, np.int32)
            else:
                episode.append(tokens, np.zeros(len(tokens), np.float32), written=False)
        return replies

    def _collect(self, *, block: bool) -> None:
        if self._pending:
            timeout = None if block and not self._ready else 0
            done, _ = futures.wait(self._pending, timeout=timeout, return_when=futures.FIRST_COMPLETED)
            for call in [call for call in self._pending if call in done]:
                self._answer(self._pending.pop(call), call)

    def end(self) -> None:
        """Let every process know how the episodes went. Raises RunError where all of them failed."""
        self._share()
        failures = [episode.failure for episode in self.episodes if episode.failure is not None]
        if failures and len(failures) == len(self.episodes):
            raise RunError(f"every episode of the rollout failed; the first: {failures[0]}")

    def _share(self) -> None:
        """Give every process what the environments said to the first one."""
        if jax.process_count() == 1:
            return
        names = ("messages", "rewards", "metrics", "failure", "finished", "cut")
        text = json.dumps([{name: getattr(episode, name) for name in names} for episode in self.episodes])
        for episode, values in zip(self.episodes, json.loads(broadcast_text(text)), strict=True):
            for name in names:
                setattr(episode, name, values[name])

    def samples(self) -> Rollouts:
        """Return the episodes as completions, [N, length]; one that failed has no token that the policy wrote."""
        count = len(self.episodes)
        tokens, logps = np.zeros((count, self.length), np.int32), np.zeros((count, self.length), np.float32)
        mask = np.zeros((count, self.length), np.bool_)
        for i, episode in enumerate(self.episodes):
            size = len(episode.tokens)
            tokens[i, :size], logps[i, :size] = episode.tokens, episode.logps
            mask[i, :size] = episode.written if episode.failure is None else False
        lengths = np.array([max(len(episode.tokens), 1) for episode in self.episodes], np.int32)
        finished = np.array([episode.finished for episode in self.episodes], np.bool_)
        return Rollouts(tokens, lengths, logps, finished, mask)

    def measure(self) -> dict[str, float]:
        """Measure the episodes, by the names of the metrics page."""
        whole = [episode for episode in self.episodes if episode.failure is None]
        turns = [len(episode.turns) for episode in whole]
        means = [plain_metrics(episode.metrics) for episode in whole]
        observed = [float(np.sum(~episode.written)) for episode in whole]
        return {
            "episodes/turns": float(np.mean(turns)) if turns else float("nan"),
            "episodes/failed": float(len(self.episodes) - len(whole)),
            "episodes/cut_ratio": float(np.mean([episode.cut for episode in whole]))
            if whole
            else float("nan"),
            "episodes/observation_tokens": float(np.mean(observed)) if observed else float("nan"),
            **{f"episodes/{name}": value for name, value in plain_metrics(means).items()},
        }


def _shared(replies: Sequence[Continuation]) -> list[Continuation]:
    """Return the first process's replies on every process."""
    plain = [
        (each.conversation, None if each.tokens is None else each.tokens.tolist(), *each[2:])
        for each in replies
    ]
    return [
        Continuation(conversation, None if tokens is None else np.array(tokens, np.int32), limit, replaces)
        for conversation, tokens, limit, replaces in json.loads(broadcast_text(json.dumps(plain)))
    ]
