"""What files of a stage say beside its metrics: whether rewards follow length, which prompts have no score, leaks."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf_core.hidden import scrub
from rlhf_report.run_reader import METRICS, ReportedStage
from rlhf_report.samples import text_of
from rlhf_report.watch.growing import parse
from rlhf_report.watch.leaks import Leaks
from rlhf_report.watch.listing import AUDIT, finite
from rlhf_report.watch.rollout_view import read_sampled, updates_per_rollout
from rlhf_report.watch.verdicts import DOUBT, Sentence, warn, well

FOLLOWS = 0.5
"""The share of the rewards' variance within groups that is length's, from which rewards follow length: half."""
FEWEST_GROUPS = 8
"""Groups whose rewards and lengths differ, below which nothing is said of them."""
FEWEST_PROMPTS = 3
"""Prompts without scores, below which words that they share may be chance."""
MOST_ROLLOUTS = 16
"""Rollouts with completions without scores whose prompts are compared."""
MOST_BYTES = 2**25
"""Bytes of what an audit printed that are read."""


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
        self.leaks = Leaks()

    def sentences(self, stage: ReportedStage) -> list[Sentence]:
        """Return a sentence for each thing that was looked for, whether it was found or not."""
        numbers = stage.files.rollout_numbers
        found = [*_audited(stage), *self._leaked(stage)]
        if numbers:
            found += self._length(stage, numbers)
            found += self._prompts(stage, numbers)
        return found

    def _of(self, stage: ReportedStage, number: int) -> RolloutEvidence:
        if number not in self._seen:
            self._seen[number] = _read(stage, number)
        return self._seen[number]

    def _length(self, stage: ReportedStage, numbers: Sequence[int]) -> list[Sentence]:
        """Say whether rewards follow length, by rollouts 0, 1, 2, 4, 8 …: rewards that are won have no spread left."""
        wanted = [0, *(2**i for i in range(max(numbers).bit_length()))]
        places = dict.fromkeys(bisect_left(numbers, each) for each in wanted if each <= numbers[-1])
        seen = [self._of(stage, numbers[place]) for place in places]
        groups = sum(each.groups for each in seen)
        length, both, reward = np.sum([each.sums for each in seen], axis=0)
        if groups < FEWEST_GROUPS:
            return []
        share = both**2 / (length * reward)
        where = f"{groups:,} groups of {len(seen)} rollouts"
        explained = f"length explains {share:.0%} of the variance of the rewards within a prompt"
        if share < FOLLOWS:
            return [well(f"In {where}, {explained}.")]
        which = "Longer" if both > 0 else "Shorter"
        text = f"{which} completions have the higher rewards: in {where}, {explained}."
        return [warn(text, DOUBT, "update", 1, sort="-spread")]

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
                    f"Reward {reward} left the completions of {len(without):,} prompts without a score. All of them "
                    f"have {named}, which none of {len(others):,} other prompts has."
                )
                found.append(
                    warn(
                        text, DOUBT, "update", points.steps[points.values.argmax()], where=reward, without="1"
                    )
                )
        return found

    def _leaked(self, stage: ReportedStage) -> list[Sentence]:
        """Say how many held-out prompts the training data have, too."""
        found = self.leaks.of(stage.files)
        if not found.held_out or not found.training:
            return []
        if not found.rows:
            return [
                well(
                    f"None of the {found.held_out:,} held-out prompts is in the training data, to the letter."
                )
            ]
        text = (
            f"{len(found.rows):,} of {found.held_out:,} held-out prompts are in the training data, too: what is "
            "measured on them says little about others."
        )
        return [warn(text, DOUBT, "evaluation", sort="leaked")]


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
    text = (
        f"By rlhf audit{late}, {len(failed):,} of {passed + len(failed):,} promises do not hold. {why}{more}"
    )
    return [warn(text, DOUBT)]


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
