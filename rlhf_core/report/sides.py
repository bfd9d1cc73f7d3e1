"""Completions that stand opposite each other: of the same prompts, or at the same place in the order of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MOST = 16
"""Prompts that are shown."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where in the order of their rewards the completions that are shown lie."""
PLACES = ("lowest reward", "a quarter up", "middle", "three quarters up", "highest reward")


@dataclass(frozen=True)
class Text:
    """One completion. rewards: {label: value, None where the function did not apply}."""

    prompt: str
    completion: str
    reward: float | None
    rewards: Mapping[str, float | None]
    length: int | None
    finished: bool


@dataclass(frozen=True)
class Side:
    """Completions that stand opposite each other. at: their place, or their prompt; before, after: may be missing.

    means: of the rewards of all that the prompt got, before and after.
    """

    at: str
    before: Text | None
    after: Text | None
    means: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Mean:
    """A mean over all completions of the prompts that were asked both times; None where nothing has a value."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Completions:
    """Completions after `updates` (first, last); the two are equal where there is only one.

    same_prompts: the sides are of the same prompts, each with the middle one of its `group` completions, and `means`
    are over all of them; else the prompts differ and the sides are at the same place in the order of rewards.
    """

    updates: tuple[int, int]
    sides: tuple[Side, ...]
    same_prompts: bool
    group: int = 1
    means: tuple[Mean, ...] = ()


def same_prompts(
    updates: tuple[int, int], early: Sequence[Text], late: Sequence[Text] | None
) -> Completions | None:
    """Both answers to every prompt that was asked both times; None where there is none. late: None, there is none."""
    before = _by_prompt(early)
    after = {} if late is None else _by_prompt(late)
    asked = [prompt for prompt in before if late is None or prompt in after]
    if not asked:
        return None
    every = [[text for prompt in asked for text in side.get(prompt, ())] for side in (before, after)]
    sides = [_opposite(prompt, before[prompt], after.get(prompt, ())) for prompt in asked[:MOST]]
    group = max(len(before[prompt]) for prompt in asked)
    return Completions(updates, tuple(sides), True, group, tuple(_means(*every)))


def same_places(updates: tuple[int, int], early: Sequence[Text], late: Sequence[Text] | None) -> Completions:
    """The lowest reward opposite the lowest, and so on up to the highest."""
    before, after = _ordered(early), None if late is None else _ordered(late)
    sides = [
        Side(name, _place(before, share), None if after is None else _place(after, share))
        for name, share in zip(PLACES, SHARES, strict=True)
    ]
    return Completions(updates, tuple(sides), False)


def _by_prompt(texts: Sequence[Text]) -> dict[str, list[Text]]:
    groups: dict[str, list[Text]] = {}
    for text in texts:
        groups.setdefault(text.prompt, []).append(text)
    return groups


def _opposite(prompt: str, before: Sequence[Text], after: Sequence[Text]) -> Side:
    means = _mean([text.reward for text in before]), _mean([text.reward for text in after])
    return Side(prompt, _middle(before), _middle(after), means)


def _means(before: Sequence[Text], after: Sequence[Text]) -> list[Mean]:
    names = dict.fromkeys(name for text in (*before, *after) for name in text.rewards)
    return [
        Mean("reward", *(_mean([text.reward for text in side]) for side in (before, after))),
        *(
            Mean(name, *(_mean([t.rewards.get(name) for t in side]) for side in (before, after)))
            for name in names
        ),
        Mean("tokens", *(_mean([text.length for text in side]) for side in (before, after))),
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None


def _ordered(texts: Sequence[Text]) -> list[Text]:
    return sorted(texts, key=lambda text: -np.inf if text.reward is None else text.reward)


def _middle(texts: Sequence[Text]) -> Text | None:
    return _place(_ordered(texts), 0.5) if texts else None


def _place(ordered: Sequence[Text], share: float) -> Text:
    return ordered[round(share * (len(ordered) - 1))]
