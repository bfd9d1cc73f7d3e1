"""A sentence on what a stage changed on the prompts or pairs that it is judged by, and whether that is noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_report.charts import number
from rlhf_report.run_reader import ReportedStage
from rlhf_report.samples import Completions

ACCURACIES = ("eval_accuracy", "eval_rewards/accuracies")
"""Metrics of the share of pairs whose chosen reply has the higher score."""
IMPROVED = "more than chance: an improvement"
DOUBTED = "more than chance, but whether it is an improvement is in doubt"
FEWEST = 4
"""Prompts below which no interval is given."""
Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


def summary(
    stage: ReportedStage,
    evaluations: Sequence[Mapping[str, Any]],
    completions: Completions | None,
    *,
    is_doubtful: bool = False,
) -> str:
    """Return the sentence; empty where nothing was evaluated. is_doubtful: a higher reward may be no improvement.

    evaluations: the first and last of evaluations/. Rewards, and losses, are compared row by row over all of
    `eval_data`. Where the first evaluation was after some updates, the few prompts whose completions were stored before
    training are told of, too.
    """
    scored = [row for row in evaluations if "prompt_rewards" in row]
    texts = []
    if len(scored) == 2:
        first, last = scored
        updates = (first["step"], last["step"])
        texts.append(_rewards(stage, updates, first["prompt_rewards"], last["prompt_rewards"]))
    if completions is not None and completions.of_fixed_prompts_twice:
        before, after = zip(*completions.prompt_means, strict=True)
        if len(scored) < 2:
            texts.append(_rewards(stage, completions.updates, before, after))
        elif scored[0]["step"] > completions.updates[0]:
            texts.append(_kept(completions.updates, before, after))
    accuracies = [name for name in ACCURACIES if name in stage.metrics]
    if not texts and evaluations and accuracies:
        texts.append(_accuracy(stage, accuracies[0], _pairs(evaluations)))
    if not texts:
        return _losses(stage, evaluations)
    text = " ".join(text for text in texts if text)
    if not text:
        return _loss(stage)
    return text.replace(IMPROVED, DOUBTED) if is_doubtful else text


def _rewards(
    stage: ReportedStage,
    updates: tuple[int, int],
    before: Sequence[float | None],
    after: Sequence[float | None],
) -> str:
    """Compare the mean rewards of the same prompts."""
    both = _both(before, after)
    if not both:
        return ""
    first, last = np.array(both, np.float64).T
    start = "before training" if updates[0] == 0 else f"after update {updates[0]:,}"
    held_out = "held-out" if stage.config.get("eval_data") else "training"
    of_all = f" of {len(before):,}" if len(both) < len(before) else ""
    prompts = f"{len(both):,}{of_all} {held_out} prompt{'s' * (len(before) > 1)}"
    text = (
        f"The mean reward of {prompts} was {number(first.mean())} {start} and {number(last.mean())} after update "
        f"{updates[1]:,}"
    )
    change = last - first
    if not change.any():
        return f"{text}: it changed for none of them."
    text += f", a change of {change.mean():+.3g}"
    if len(both) < FEWEST:
        return f"{text}. So few prompts say nothing about others."
    half = t_quantile(len(both) - 1) * change.std(ddof=1) / np.sqrt(len(both))
    low = change.mean() - half
    high = change.mean() + half
    verdict = "which may be noise: the interval contains 0"
    if low > 0:
        verdict = IMPROVED
    elif high < 0:
        verdict = "more than chance: the model is worse than before"
    return f"{text} (95 % interval over prompts: {low:+.3g} to {high:+.3g}), {verdict}."


def _kept(updates: tuple[int, int], before: Sequence[float | None], after: Sequence[float | None]) -> str:
    """Say what the mean reward of the few prompts was whose completions were stored before the first evaluation."""
    both = _both(before, after)
    if not both:
        return ""
    first, last = np.mean(np.array(both, np.float64), axis=0)
    start = "before training" if updates[0] == 0 else f"after update {updates[0]:,}"
    return (
        f"For the {len(both):,} whose completions are kept it was {number(float(first))} {start} and "
        f"{number(float(last))} after update {updates[1]:,}."
    )


def _both(before: Sequence[float | None], after: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(b, a) for b, a in zip(before, after, strict=False) if b is not None and a is not None]


def _pairs(evaluations: Sequence[Mapping[str, Any]]) -> int:
    """Count the pairs that were evaluated last: those of the last calibration, where there is one."""
    calibrations = [row["calibration"] for row in evaluations if "calibration" in row]
    if calibrations:
        return round(sum(row_bin["pairs"] for row_bin in calibrations[-1]))
    pairs: int = evaluations[-1].get("pairs", 0)
    return pairs


def _losses(stage: ReportedStage, evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Say what the held-out loss was, and how the losses of rows changed between two evaluations that have them."""
    text = _loss(stage)
    lost = [row["row_losses"] for row in evaluations if "row_losses" in row]
    if text and len(lost) == 2:
        text += _loss_of_rows(lost[0], lost[1])
    return text


def _loss_of_rows(before: Sequence[float | None], after: Sequence[float | None]) -> str:
    """Say in how many rows the loss fell, and by how much in the mean over rows, with its interval."""
    both = _both(before, after)
    if len(both) < FEWEST:
        return ""
    first, last = np.array(both, np.float64).T
    change = last - first
    half = t_quantile(len(both) - 1) * change.std(ddof=1) / np.sqrt(len(both))
    low = change.mean() - half
    high = change.mean() + half
    noise = "" if low > 0 or high < 0 else ", which may be noise"
    return (
        f" It fell for {np.count_nonzero(change < 0):,} of {len(both):,} held-out rows: a change of "
        f"{change.mean():+.3g} in the mean over rows (95 % interval: {low:+.3g} to {high:+.3g}){noise}."
    )


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, within 1 % from 3 degrees of freedom (Fisher's expansion)."""
    z = Z
    n = float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, 1))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `count` cases (Wilson 1927)."""
    middle = share + Z**2 / (2 * count)
    half = Z * np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return float((middle - half) / (1 + Z**2 / count)), float((middle + half) / (1 + Z**2 / count))


def _accuracy(stage: ReportedStage, name: str, pairs: int) -> str:
    update, last = stage.metrics[name].at(stage.saved) or (0.0, -1.0)
    if pairs < 1 or not 0 <= last <= 1:
        return ""
    low, high = wilson(last, pairs)
    chance = "" if low > 0.5 or high < 0.5 else ", which guessing could reach too"
    return (
        f"After update {update:,.0f}{_saved(stage)} the chosen reply has the higher score in {last:.1%} of {pairs:,} "
        f"held-out pairs (95 % interval: {low:.1%} to {high:.1%}){chance}."
    )


def _saved(stage: ReportedStage) -> str:
    """Say that an update's model is the one that was saved, where that is not the last."""
    return (
        "" if stage.saved is None else f", whose model was saved instead of that of update {stage.updates:,},"
    )


def _loss(stage: ReportedStage) -> str:
    points = stage.metrics.get("eval_loss")
    found = None if points is None else points.at(stage.saved)
    if points is None or found is None:
        return ""
    update, value = found
    last = f"{number(value)} after update {update:,.0f}{_saved(stage)}"
    if len(points.steps) < 2 or update == points.steps[0]:
        return f"The held-out loss was {last}."
    first = f"{number(points.values[0])} after update {points.steps[0]:,.0f}"
    worse = ": worse than at the first evaluation" if value > points.values[0] else ""
    return f"The held-out loss was {first} and {last}{worse}."
