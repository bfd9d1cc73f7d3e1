"""What was said in the episodes of a rollout, beside the tokens of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.environments import Episodes, TurnRecord

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Conversations:
    """The prompts and turns of P groups of episodes, N in all.

    prompts: int32 [n] each, one per group. turns: of each episode. rewards: each episode's, one per answered turn, and
        failures: a text, or None; both empty after a restore, which does not need them.
    one_row_per_turn: whether every turn is a training row of its own.
    """

    prompts: Sequence[Ints]
    turns: Sequence[Sequence[TurnRecord]]
    rewards: Sequence[Sequence[float | None]] = ()
    failures: Sequence[str | None] = ()
    one_row_per_turn: bool = False

    @classmethod
    def of(cls, episodes: Episodes, group: int, *, one_row_per_turn: bool) -> Conversations:
        """Collect what was said; a group all of whose episodes failed has a prompt of one token."""
        every = episodes.episodes
        prompts = [
            next((e.prompt for e in every[i : i + group] if len(e.prompt)), np.zeros(1, np.int32))
            for i in range(0, len(every), group)
        ]
        return cls(
            prompts,
            [tuple(episode.turns) for episode in every],
            [tuple(episode.rewards) for episode in every],
            [episode.failure for episode in every],
            one_row_per_turn,
        )

    def take(self, groups: NDArray[np.intp], rows: NDArray[np.intp]) -> Conversations:
        """Select these groups, whose episodes are `rows`."""
        chosen = rows.tolist()
        return Conversations(
            [self.prompts[i] for i in groups.tolist()],
            [self.turns[i] for i in chosen],
            [self.rewards[i] for i in chosen],
            [self.failures[i] for i in chosen],
            self.one_row_per_turn,
        )

    @classmethod
    def join(cls, parts: Sequence[Conversations | None]) -> Conversations | None:
        """Concatenate the conversations of several rounds of sampling."""
        held = [part for part in parts if part is not None]
        if not held:
            return None
        return cls(
            [prompt for part in held for prompt in part.prompts],
            [turns for part in held for turns in part.turns],
            [rewards for part in held for rewards in part.rewards],
            [failure for part in held for failure in part.failures],
            held[0].one_row_per_turn,
        )

    def described(self, i: int) -> dict[str, Any]:
        """Describe episode i for a reader of its sample."""
        rewards = [*self.rewards[i], *[None] * (len(self.turns[i]) - len(self.rewards[i]))]
        turns = [
            {"message": turn.message, "tokens": turn.end - turn.start, "reward": reward}
            for turn, reward in zip(self.turns[i], rewards, strict=True)
        ]
        failure = self.failures[i]
        return {"turns": turns, **({} if failure is None else {"failure": failure})}

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint keeps: texts of any length, one after the other, with their lengths."""
        every = [(i, turn) for i, turns in enumerate(self.turns) for turn in turns]
        contexts = [np.zeros(0, np.int32) if turn.context is None else turn.context for _, turn in every]
        arrays = {
            "prompts": np.concatenate([np.zeros(0, np.int32), *self.prompts]),
            "prompt_lengths": np.array([len(prompt) for prompt in self.prompts], np.int32),
            "counts": np.array([len(turns) for turns in self.turns], np.int32),
            "spans": np.array([(turn.start, turn.end) for _, turn in every], np.int32).reshape(-1, 2),
            "contexts": np.concatenate([np.zeros(0, np.int32), *contexts]),
            "context_lengths": np.array([len(context) for context in contexts], np.int32),
            "one_row_per_turn": np.array(self.one_row_per_turn, np.int32),
        }
        return {prefix + name: array for name, array in arrays.items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str) -> Conversations | None:
        """Make conversations of what `arrays` returned; None where it is not there."""
        if f"{prefix}prompts" not in arrays:
            return None
        kept = {
            name.removeprefix(prefix): np.asarray(arrays[name]) for name in arrays if name.startswith(prefix)
        }
        contexts = iter(_split(kept["contexts"], kept["context_lengths"]))
        every = iter(
            TurnRecord(int(start), int(end), context if len(context) else None)
            for (start, end), context in zip(kept["spans"], contexts, strict=True)
        )
        turns = [tuple(next(every) for _ in range(count)) for count in kept["counts"].tolist()]
        prompts = _split(kept["prompts"], kept["prompt_lengths"])
        return cls(prompts, turns, one_row_per_turn=bool(kept["one_row_per_turn"]))


def _split(flat: NDArray[Any], lengths: NDArray[Any]) -> list[Ints]:
    return np.split(flat, np.cumsum(lengths)[:-1]) if len(lengths) else []
