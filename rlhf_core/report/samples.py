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

from rlhf_core.report.run import StageRun, rows

READ = 60
"""Files of completions that are read for the distributions, evenly spread over the run."""
LONGEST = 4000
"""Characters of a text that are shown."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where in the order of their rewards the completions that are shown lie."""
PERCENTILES = (5, 25, 50, 75, 95)


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
    """Completions that stand opposite each other. at: their place, or their prompt; before, after: may be missing."""

    at: str
    before: Text | None
    after: Text | None


@dataclass(frozen=True)
class Completions:
    """The first and the last completions that were kept, of `updates` (first, last).

    sides, same_prompts: see `opposite`.
    """

    updates: tuple[int, int]
    sides: tuple[Side, ...]
    same_prompts: bool


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
    """What the stage's completions show; (None, []) where it kept none."""
    kept = _numbered(stage.dir / "samples", "update-*.jsonl")
    at = sorted(kept)
    if len(at) > READ:
        at = [at[i] for i in np.unique(np.linspace(0, len(at) - 1, READ).astype(int))]
    read = {step: found for step in at if (found := list(_texts(kept[step], problems)))}
    if not read:
        return None, []
    steps = list(read)
    spreads = [
        _spread("reward", read, lambda text: text.reward),
        _spread("length", read, lambda text: text.length),
    ]
    return opposite(read, (steps[0], steps[-1])), [each for each in spreads if each is not None]


def opposite(read: Mapping[int, Sequence[Text]], ends: tuple[int, int]) -> Completions:
    """The same prompts early and late, where the kept files have any; else the same places in the order of rewards."""
    early, late = (_by_prompt(read, reverse) for reverse in (True, False))
    again = [prompt for prompt in late if early[prompt][0] < late[prompt][0]]
    if again:
        sides = [
            Side(prompt, _middle(early[prompt][1]), _middle(late[prompt][1]))
            for prompt in again[: len(SHARES)]
        ]
        return Completions(ends, tuple(sides), True)
    first, last = (_ordered(read[end]) for end in ends)
    names = ("lowest reward", "a quarter up", "middle", "three quarters up", "highest reward")
    sides = [
        Side(name, _place(first, share), _place(last, share) if ends[0] != ends[1] else None)
        for name, share in zip(names, SHARES, strict=True)
    ]
    return Completions(ends, tuple(sides), False)


def scored_pairs(stage: StageRun, problems: list[str]) -> list[ScoredPair]:
    """The pairs that the stage's evaluations showed."""
    kept = _numbered(stage.dir / "samples", "evaluation-*.jsonl")
    found: dict[tuple[str, str, str], list[tuple[int, float, float]]] = {}
    for step in sorted({min(kept), max(kept)} if kept else ()):
        for row in rows(kept[step], problems):
            scores = [row.get("chosen_score"), row.get("rejected_score")]
            if all(isinstance(score, int | float) for score in scores):
                key = tuple(_shown(row.get(name)) for name in ("prompt", "chosen", "rejected"))
                found.setdefault(key, []).append((step, *map(float, scores)))  # type: ignore[arg-type]
    return [ScoredPair(*texts, tuple(scores)) for texts, scores in found.items()]


def evaluations(stage: StageRun, problems: list[str]) -> list[dict[str, Any]]:
    """The first and the last of evaluations/, oldest first: `step`, `scores` and `calibration`."""
    kept = _numbered(stage.dir / "evaluations", "*.json")
    found = []
    for step in sorted({min(kept), max(kept)} if kept else ()):
        try:
            row = json.loads(kept[step].read_bytes())
            whole = {"step": step, "scores": {**row["scores"]}, "calibration": [*row["calibration"]]}
            found.append(whole)
        except (OSError, ValueError, KeyError, TypeError):
            problems.append(f"{stage.name}/evaluations/{kept[step].name} is not readable")
    return found


def _numbered(directory: Path, pattern: str) -> dict[int, Path]:
    """{the number in its name: file}."""
    files = directory.glob(pattern) if directory.is_dir() else ()
    return {int(found[1]): path for path in files if (found := re.search(r"(\d+)\.jsonl?$", path.name))}


def _texts(path: Path, problems: list[str]) -> Iterable[Text]:
    for row in rows(path, problems):
        if "completion" not in row:
            continue
        rewards = row.get("rewards")
        length = row.get("length")
        yield Text(
            _shown(row.get("prompt")),
            _shown(row["completion"]),
            _number(row.get("reward")),
            {str(k): _number(v) for k, v in rewards.items()} if isinstance(rewards, dict) else {},
            length if isinstance(length, int) else None,
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


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _by_prompt(read: Mapping[int, Sequence[Text]], backwards: bool) -> dict[str, tuple[int, list[Text]]]:
    """{prompt: (step, its completions)} of the first step that has the prompt, or of the last."""
    found: dict[str, tuple[int, list[Text]]] = {}
    for step in sorted(read, reverse=backwards):
        groups: dict[str, list[Text]] = {}
        for text in read[step]:
            groups.setdefault(text.prompt, []).append(text)
        found |= {prompt: (step, texts) for prompt, texts in groups.items()}
    return found


def _ordered(texts: Sequence[Text]) -> list[Text]:
    return sorted(texts, key=lambda text: -np.inf if text.reward is None else text.reward)


def _middle(texts: Sequence[Text]) -> Text:
    return _place(_ordered(texts), 0.5)


def _place(ordered: Sequence[Text], share: float) -> Text:
    return ordered[round(share * (len(ordered) - 1))]


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
