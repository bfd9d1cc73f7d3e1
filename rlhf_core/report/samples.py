"""What samples/ and evaluations/ hold: completions with rewards, pairs with scores, how scores are spread."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.report.json_values import number, numbers, table
from rlhf_core.report.run_reader import StageRun, json_object, rows

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


READ = 60
"""Files of completions that are read for the distributions, evenly spread over the run."""
LONGEST = 4000
"""Characters of a text that are shown."""
PERCENTILES = (5, 25, 50, 75, 95)


BIN = ("confidence", "right", "pairs")
"""What a bin of the calibration holds."""


@dataclass(frozen=True)
class Spread:
    """A quantity at several updates: `percentiles` float64 [updates, 5]; `first` and `last`, every value then."""

    name: str
    updates: NDArray[np.float64]
    percentiles: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]


@dataclass(frozen=True)
class ScoredPair:
    """A held-out pair. scores: (update, chosen, rejected) of the first and the last evaluation."""

    prompt: str
    chosen: str
    rejected: str
    scores: tuple[tuple[int, float, float], ...]


def completions(stage: StageRun, problems: list[str]) -> tuple[Completions | None, list[Spread]]:
    """What the stage's completions show, and how rewards and lengths of its rollouts are spread; (None, []) without."""
    kept = _numbered(stage.dir / "samples", "update-*.jsonl")
    at = sorted(kept)
    if len(at) > READ:
        at = [at[i] for i in np.unique(np.linspace(0, len(at) - 1, READ).astype(int))]
    read = {step: found for step in at if (found := list(_texts(kept[step], problems)))}
    spreads = []
    if read:
        spreads = [
            _spread("reward", read, lambda text: text.reward),
            _spread("length", read, lambda text: text.length),
        ]
    opposite = _fixed_prompts(stage, problems) or (_of_rollouts(read) if read else None)
    return opposite, [each for each in spreads if each is not None]


def _fixed_prompts(stage: StageRun, problems: list[str]) -> Completions | None:
    """The first answers to the prompts that were asked again and again, and those of the trained model."""
    kept = _numbered(stage.dir / "samples", "evaluation-*.jsonl")
    best = json_object(stage.dir / "best.json", problems).get("model")
    trained = best if isinstance(best, int) and best in kept else max(kept, default=0)
    ends = sorted({min(kept), trained} if kept else ())
    read = [(step, found) for step in ends if (found := list(_texts(kept[step], problems)))]
    if not read:
        return None
    (first, early), (last, late) = read[0], read[-1]
    return same_prompts((first, last), early, late if len(read) > 1 else None)


def _of_rollouts(read: Mapping[int, Sequence[Text]]) -> Completions:
    """The first rollout opposite the last one: the prompts that they share, else what stands at the same place."""
    first, last = min(read), max(read)
    late = read[last] if last != first else None
    shared = None if late is None else same_prompts((first, last), read[first], late)
    return shared or same_places((first, last), read[first], late)


def scored_pairs(stage: StageRun, problems: list[str]) -> list[ScoredPair]:
    """The pairs that the stage's evaluations showed."""
    kept = _numbered(stage.dir / "samples", "evaluation-*.jsonl")
    found: dict[tuple[str, str, str], list[tuple[int, float, float]]] = {}
    for step in sorted({min(kept), max(kept)} if kept else ()):
        for row in rows(kept[step], problems):
            chosen, rejected = number(row.get("chosen_score")), number(row.get("rejected_score"))
            if chosen is not None and rejected is not None:
                key = (_shown(row.get("prompt")), _shown(row.get("chosen")), _shown(row.get("rejected")))
                found.setdefault(key, []).append((step, chosen, rejected))
    return [ScoredPair(*texts, tuple(scores)) for texts, scores in found.items()]


def evaluations(stage: StageRun, problems: list[str]) -> list[dict[str, Any]]:
    """The first and the last of evaluations/, oldest first: `step`, `scores` and `calibration`."""
    kept = _numbered(stage.dir / "evaluations", "*.json")
    found = []
    for step in sorted({min(kept), max(kept)} if kept else ()):
        row = _evaluation(kept[step])
        if row is None:
            problems.append(f"{stage.name}/evaluations/{kept[step].name} is not readable")
        else:
            found.append({"step": step, **row})
    return found


def _evaluation(path: Path) -> dict[str, Any] | None:
    """`scores` and `calibration` of one evaluation's file; None where they are not what an evaluation writes."""
    try:
        row = table(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None
    scores, listed = table(row.get("scores")), row.get("calibration")
    edges = numbers(scores.get("edges"))
    if not edges or not isinstance(listed, list):
        return None
    counts = {side: numbers(scores.get(side), len(edges) - 1) for side in ("chosen", "rejected")}
    bins = [{key: number(table(each).get(key)) for key in BIN} for each in listed]
    if None in counts.values() or any(None in each.values() or (each["pairs"] or 0) < 0 for each in bins):
        return None
    return {"scores": {"edges": edges, **counts}, "calibration": bins}


def _numbered(directory: Path, pattern: str) -> dict[int, Path]:
    """{the number in its name: file}."""
    files = directory.glob(pattern) if directory.is_dir() else ()
    return {int(found[1]): path for path in files if (found := re.search(r"(\d+)\.jsonl?$", path.name))}


def _texts(path: Path, problems: list[str]) -> Iterable[Text]:
    for row in rows(path, problems):
        if "completion" not in row:
            continue
        yield Text(
            _shown(row.get("prompt")),
            _shown(row["completion"]),
            number(row.get("reward")),
            {name: number(value) for name, value in table(row.get("rewards")).items()},
            None if (length := number(row.get("length"))) is None else int(length),
            row.get("finished") is not False,
        )


def _shown(value: Any) -> str:
    """A text, or a conversation as one."""
    if isinstance(value, list):
        value = "\n".join(
            f"{turn.get('role', '')}: {turn.get('content', '')}" if isinstance(turn, dict) else str(turn)
            for turn in value
        )
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def _spread(name: str, read: Mapping[int, Sequence[Text]], of: Any) -> Spread | None:
    values = {
        step: np.array(own, np.float64)
        for step, texts in read.items()
        if (own := [value for text in texts if (value := of(text)) is not None])
    }
    if not values:
        return None
    steps = list(values)
    return Spread(
        name,
        np.array(steps, np.float64),
        np.array([np.percentile(values[step], PERCENTILES) for step in steps]),
        values[steps[0]],
        values[steps[-1]],
    )
