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

from rlhf_core.report.run import StageRun, json_object, rows
from rlhf_core.report.sides import Completions, Text, same_places, same_prompts
from rlhf_core.report.values import number, numbers, table

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
