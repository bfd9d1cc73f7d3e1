"""What files of a stage say beside its metrics: whether rewards follow length, which prompts have no score, leaks."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_core.hidden import scrub
from rlhf_report.run_reader import METRICS, ReportedStage
from rlhf_report.samples import text_of
from rlhf_report.watch.growing import parse
from rlhf_report.watch.listing import finite
from rlhf_report.watch.rollout_view import read_sampled, updates_per_rollout
from rlhf_report.watch.rows_view import data_files
from rlhf_report.watch.verdicts import Sentence, warn

AUDIT = "audit.json"
"""In the run's directory, where one has written it: what `rlhf audit RUN --json` printed."""
FOLLOWS = 0.5
"""The share of the rewards' variance within groups that is length's, from which rewards follow length: half."""
FEWEST_GROUPS = 8
"""Groups whose rewards and lengths differ, below which nothing is said of them."""
FEWEST_PROMPTS = 3
"""Prompts without scores, below which words that they share may be chance."""
MOST_ROLLOUTS = 16
"""Rollouts with completions without scores whose prompts are compared."""
MOST_BYTES = 2**25
"""Bytes of the data of each side that are read for leaks; what lies behind them is not looked at."""


@dataclass
class RolloutEvidence:
    """What a rollout adds to the evidence.

    sums: of the products of rewards and lengths about the means of their groups: length², reward × length, reward².
    groups: how many have a spread in both. unscored, scored: {reward: prompts none or all of whose completions it left
    without a score, or scored}.
    """

    sums: np.ndarray = field(default_factory=lambda: np.zeros(3))
    groups: int = 0
    unscored: dict[str, set[str]] = field(default_factory=dict)
    scored: dict[str, set[str]] = field(default_factory=dict)


class FileEvidence:
    """The evidence of a stage; each rollout is read once."""

    def __init__(self) -> None:
        self._seen: dict[int, RolloutEvidence] = {}
        self._leak: tuple[Any, list[Sentence]] = ((), [])

    def sentences(self, stage: ReportedStage) -> list[Sentence]:
        """Return a sentence for each thing that was found."""
        numbers = stage.files.rollout_numbers
        found = [*_audited(stage), *self._leaks(stage)]
        if numbers:
            found += self._length(stage, numbers)
            found += self._prompts(stage, numbers)
        return found

    def _of(self, stage: ReportedStage, number: int) -> RolloutEvidence:
        if number not in self._seen:
            self._seen[number] = _read(stage, number)
        return self._seen[number]

    def _length(self, stage: ReportedStage, numbers: Sequence[int]) -> list[Sentence]:
        """Say that rewards follow length, by the rollouts 0, 1, 2, 4, 8 …: rewards that are won have no spread left."""
        wanted = [0, *(2**i for i in range(max(numbers).bit_length()))]
        places = dict.fromkeys(bisect_left(numbers, each) for each in wanted if each <= numbers[-1])
        seen = [self._of(stage, numbers[place]) for place in places]
        groups = sum(each.groups for each in seen)
        length, both, reward = np.sum([each.sums for each in seen], axis=0)
        if groups < FEWEST_GROUPS or both**2 < FOLLOWS * length * reward:
            return []
        share = both**2 / (length * reward)
        text = (
            f"{'Longer' if both > 0 else 'Shorter'} completions have the higher rewards: in {groups:,} groups of "
            f"{len(seen)} rollouts, length explains {share:.0%} of the differences between the rewards of a prompt."
        )
        return [warn(text, "update", 1, sort="-spread")]

    def _prompts(self, stage: ReportedStage, numbers: Sequence[int]) -> list[Sentence]:
        """Say what the prompts have in common that a reward left without a score."""
        times = updates_per_rollout(stage.files)
        found = []
        for name in stage.metrics:
            reward = name.removeprefix("rewards/").removesuffix("/unscored")
            if name != f"rewards/{reward}/unscored" or not stage.metrics[name].values.any():
                continue
            points = stage.metrics[name]
            at = {(int(step) - 1) // times for step in points.steps[points.values > 0]} & set(numbers)
            seen = [self._of(stage, number) for number in sorted(at)[:MOST_ROLLOUTS]]
            without = set().union(*(each.unscored.get(reward, set()) for each in seen))
            others = set().union(*(each.scored.get(reward, set()) for each in seen))
            words = _words_of_all(without) - set().union(*map(_words, others))
            if len(without) >= FEWEST_PROMPTS and words and len(others) >= len(without):
                named = ", ".join(f"“{scrub(word)[:40]}”" for word in sorted(words)[:3])
                text = (
                    f"The {len(without):,} prompts whose completions {reward} left without a score all have {named}, "
                    f"which none of {len(others):,} others has."
                )
                found.append(
                    warn(text, "update", points.steps[points.values.argmax()], where=reward, without="1")
                )
        return found

    def _leaks(self, stage: ReportedStage) -> list[Sentence]:
        """Say how many held-out prompts the training data have, too."""
        files = [
            sorted(set(data_files(stage.files, field).values())) for field in ("train_data", "eval_data")
        ]
        mark = [_mark(path) for side in files for path in side]
        if self._leak[0] != mark:
            self._leak = (mark, _leaked(*files) if all(files) else [])
        return self._leak[1]


def _audited(stage: ReportedStage) -> list[Sentence]:
    """Say what an audit found, where someone has kept it in the run's directory."""
    path = stage.files.dir.parent / AUDIT
    try:
        with open(path, "rb") as file:
            content = parse(file.read(MOST_BYTES)) or {}
        written = os.stat(path).st_mtime
        logged = os.stat(stage.files.dir / METRICS).st_mtime
    except OSError:
        return []
    checks = _checks(content, stage.name)
    failed = [each for each in checks if each.get("verdict") == "FAIL"]
    passed = sum(each.get("verdict") == "pass" for each in checks)
    if not passed and not failed:
        return []
    late = "" if written >= logged else ", before its last updates"
    if not failed:
        return [Sentence(f"By rlhf audit{late}, all of the {passed:,} promises that it could check hold.")]
    why = "; ".join(scrub(f"{each.get('name')}: {each.get('why')}")[:300] for each in failed[:3])
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    return [
        warn(
            f"By rlhf audit{late}, {len(failed):,} of {passed + len(failed):,} promises do not hold. {why}{more}"
        )
    ]


def _checks(content: Mapping[str, Any], stage: str) -> list[Mapping[str, Any]]:
    """Return the checks of a stage in what an audit printed; none where it has another form."""
    stages = content.get("stages")
    every = stages.get(stage) if isinstance(stages, Mapping) else None
    return [each for each in every if isinstance(each, Mapping)] if isinstance(every, list) else []


def _read(stage: ReportedStage, number: int) -> RolloutEvidence:
    rollout = read_sampled(stage.files, number * updates_per_rollout(stage.files) + 1)
    seen = RolloutEvidence()
    if rollout is None:
        return seen
    for start in range(0, len(rollout.samples), rollout.group):
        group = rollout.samples[start : start + rollout.group]
        _add_lengths(seen, group)
        prompt = text_of(group[0].get("prompt"))
        tables = [each["rewards"] for each in group if isinstance(each.get("rewards"), Mapping)]
        for name in tables[0] if tables else ():
            values = [finite(table.get(name)) for table in tables]
            kind = seen.unscored if all(value is None for value in values) else seen.scored
            if all(value is not None for value in values) or kind is seen.unscored:
                kind.setdefault(str(name), set()).add(prompt)
    return seen


def _add_lengths(seen: RolloutEvidence, group: Sequence[Mapping[str, Any]]) -> None:
    pairs = [(finite(each.get("length")), finite(each.get("reward"))) for each in group]
    known = np.array([pair for pair in pairs if None not in pair], np.float64)
    if len(known) < 2 or not np.ptp(known, axis=0).all():
        return
    length, reward = (known - known.mean(axis=0)).T
    seen.sums += [length @ length, length @ reward, reward @ reward]
    seen.groups += 1


def _words(text: str) -> set[str]:
    return set(text.split())


def _words_of_all(texts: set[str]) -> set[str]:
    return set.intersection(*map(_words, texts)) if texts else set()


def _mark(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _leaked(train: Sequence[str], held_out: Sequence[str]) -> list[Sentence]:
    wanted = [prompt for path in held_out for prompt in _prompts_of(path)]
    asked = set(wanted)
    if not asked:
        return []
    known = {prompt for path in train for prompt in _prompts_of(path) if prompt in asked}
    count = sum(prompt in known for prompt in wanted)
    if not count:
        return []
    text = (
        f"{count:,} of {len(wanted):,} held-out prompts are in the training data, too: what is measured on them says "
        "little about others."
    )
    return [warn(text, "evaluation")]


def _prompts_of(path: str) -> Iterator[str]:
    """Yield the prompts of a .jsonl file, or the texts of rows without one; nothing of other or unreadable files."""
    if not path.endswith(".jsonl"):
        return
    try:
        with open(path, "rb") as file:
            for line in file.readlines(MOST_BYTES):
                row = parse(line)
                prompt = "" if row is None else _prompt_of(row)
                if prompt:
                    yield prompt
    except OSError:
        return


def _prompt_of(row: Mapping[str, Any]) -> str:
    said = row.get("messages")
    if isinstance(said, list):
        return text_of(said[:-1])
    return next((text_of(row[name]) for name in ("prompt", "question", "text", "chosen") if name in row), "")
