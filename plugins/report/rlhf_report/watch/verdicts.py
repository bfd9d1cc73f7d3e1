"""The verdict on a stage, a sentence for each thing that a reader should know first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import rlhf_report.samples as samples
from rlhf_report.charts import number
from rlhf_report.run_reader import Points, ReportedStage
from rlhf_report.summary import summary, t_quantile

LEAST = 8
"""Logged rows below which nothing is said of a trend."""
GROWN = 1.5
"""The last quarter's mean completion length over the first's, from which it is said with a growing reward."""
KL_GROWN, KL_LARGE = 3.0, 0.1
"""The last quarter's mean KL over the second quarter's, and nats per token, from which both together are said."""
FAR = 1.0
"""Nats per token to the reference that no useful policy is away: its tokens are e times as likely as they were."""
COLLAPSED = 0.1
"""The last quarter's mean entropy over the first value, below which a policy has collapsed that is far or no better."""
ERRORS = 3.0
"""Standard errors by which quarters differ for sure; more than two, for neighbouring updates are alike."""
LEAPT = 2.0
"""The mean loss of three logged rows over the first one: a loss begins at what guessing gives; a row is noisy."""
EQUAL = 0.8
"""The share of groups with equal rewards from which it is said that nothing is learnt."""
EVIDENCE = 9.0
"""log10 of the evidence against the sampler from which it is said: one in a billion by chance."""


@dataclass(frozen=True)
class Sentence:
    """A sentence of a verdict.

    tone: "warning" for what may be wrong. see: where it shows, the `kind` of a view, "update", "rows" or "evaluation",
    the `update`, of those that were kept the nearest, and the `query` of its address; None without one.
    """

    text: str
    tone: Literal["", "warning"] = ""
    see: Mapping[str, Any] | None = None


def warn(text: str, kind: str = "", update: float | None = None, **query: str) -> Sentence:
    """Make a sentence on what may be wrong, and where it shows; no kind: nowhere; no update: the newest."""
    return Sentence(text, "warning", _place(kind, update, query) if kind else None)


def _place(kind: str, update: float | None, query: Mapping[str, str]) -> Mapping[str, Any]:
    return {"kind": kind, "update": None if update is None else int(update), "query": query}


def verdict(stage: ReportedStage, problems: list[str], evidence: Sequence[Sentence] = ()) -> list[Sentence]:
    """Return what the stage changed on held-out data, which model it saved, then the evidence, and then `warnings`.

    problems: files that cannot be read are added. evidence: what other files say, of `evidence.py`.
    """
    evaluations = samples.evaluations(stage, problems)
    shown = samples.fixed_prompts(stage, problems, "evaluation")
    found = [Sentence(text) for text in (summary(stage, evaluations, shown), _saved(stage)) if text]
    return [*found, *evidence, *warnings(stage.metrics)]


def warnings(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Return what may be wrong by the metrics alone, what ruins a run first."""
    return [
        *_broken(metrics),
        *_running_away(metrics),
        *_overfitting(metrics),
        *_unscored(metrics),
        *_nothing_to_learn(metrics),
        *_not_finite(metrics),
        *_sampler(metrics),
    ]


def _saved(stage: ReportedStage) -> str:
    if stage.saved is None:
        return ""
    return f"The saved model is that of update {stage.saved:,}, the best evaluation."


def _overfitting(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say that the held-out loss has risen since its lowest value while the training loss has fallen."""
    held_out, train = metrics.get("eval_loss"), metrics.get("loss")
    if held_out is None or train is None or len(held_out.values) < 3 or len(train.values) < LEAST:
        return []
    least = int(held_out.values.argmin())
    low, last = float(held_out.values[least]), float(held_out.values[-1])
    since = train.values[train.steps > held_out.steps[least]]
    if (
        last <= low + 0.02 * abs(low)
        or len(since) < 4
        or since[-len(since) // 2 :].mean() >= since[: len(since) // 2].mean()
    ):
        return []
    text = (
        f"It overfits: the held-out loss was lowest, {number(low)}, after update {held_out.steps[least]:,.0f} and is "
        f"{number(last)} now, while the training loss went on falling."
    )
    return [warn(text, "evaluation", held_out.steps[-1])]


def _parts(points: Points | None) -> list[np.ndarray]:
    """Return the values in the four quarters of a curve's updates; empty where it is too short, or a quarter is."""
    if points is None or len(points.values) < LEAST:
        return []
    ends = np.linspace(points.steps[0], points.steps[-1], 5)[1:-1]
    parts = np.split(points.values, np.searchsorted(points.steps, ends, side="right"))
    return parts if min(map(len, parts)) > 1 else []


def _quarters(points: Points | None) -> list[float]:
    """Return the means of `_parts`."""
    return [float(part.mean()) for part in _parts(points)]


def _change(points: Points | None) -> tuple[float, float, float] | None:
    """Return the means of the first and last quarter and the standard error of their difference; None if too short."""
    parts = _parts(points)
    if not parts:
        return None
    first, last = parts[0], parts[-1]
    error = np.sqrt(first.var(ddof=1) / len(first) + last.var(ddof=1) / len(last))
    # Few values say little about their spread.
    wide = t_quantile(min(len(first), len(last)) - 1) / t_quantile(1000)
    return float(first.mean()), float(last.mean()), float(error * wide)


def _broken(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say that training made things worse, or that the policy collapsed: mostly by too high a learning rate."""
    reward = _change(metrics.get("reward"))
    if reward is None:
        return _diverged(metrics)
    kl = _quarters(metrics.get("kl"))
    is_far = bool(kl) and kl[-1] > FAR
    first, last, error = reward
    has_fallen, has_risen = first - last > ERRORS * error, last - first > ERRORS * error
    found = []
    seen, entropy = metrics["reward"].steps[-1], metrics.get("entropy")
    after = _quarters(entropy)
    if entropy is not None and after and (is_far or not has_risen):
        low = entropy.steps[entropy.values < COLLAPSED * entropy.values[0]]
        if len(low) and after[-1] < COLLAPSED * entropy.values[0]:
            seen = low[0]
            found.append(
                f"The policy collapsed: its entropy went from {number(float(entropy.values[0]))} nats per token to "
                f"{number(after[-1])}, below a tenth first at update {seen:,.0f}."
            )
    if has_fallen:
        found.append(
            f"The reward fell from {number(first)} in the first quarter of the updates to {number(last)} in the last."
        )
    if is_far and not has_risen:
        found.append(
            f"The policy is {number(kl[-1])} nats per token away from the reference, and no better for it."
        )
    if not found:
        return []
    return [warn(" ".join([*found, f"The updates do harm: {_too_high(metrics)}."]), "update", seen)]


def _diverged(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say that the training loss rose, or was far above its beginning for a while."""
    points = metrics.get("loss")
    change = _change(points)
    if points is None or change is None:
        return []
    first, last, error = change
    if last - first > ERRORS * error:
        text = f"The training loss rose from {number(first)} to {number(last)}: {_too_high(metrics)}."
        return [warn(text, "rows", points.steps[-1])]
    began = float(points.values[0])
    means = np.convolve(points.values, np.full(3, 1 / 3), "valid")
    most = int(means.argmax())
    if means[most] > LEAPT * began > 0:
        text = (
            f"The training loss leapt from {number(began)} to {number(float(means[most]))} near update "
            f"{points.steps[most + 1]:,.0f}: {_too_high(metrics)}."
        )
        return [warn(text, "rows", points.steps[most + 1])]
    return []


def _too_high(metrics: Mapping[str, Points]) -> str:
    rate = metrics.get("learning_rate")
    if rate is None:
        return "try a lower learning_rate"
    return f"the learning_rate went up to {number(float(rate.values.max()))}, try a lower one"


def _running_away(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say that the reward grew with the completions' length, or with the distance to the reference."""
    reward, length, kl, cut = (
        _quarters(metrics.get(n))
        for n in ("reward", "completions/mean_length", "kl", "completions/clipped_ratio")
    )
    if not reward or reward[-1] <= reward[0]:
        return []
    found, newest = [], metrics["reward"].steps[-1]
    rose = f"The reward rose from {number(reward[0])} to {number(reward[-1])}"
    if length and (length[-1] > GROWN * length[0] or length[-1] * GROWN < length[0]):
        at_limit = f", {cut[-1]:.0%} of them cut at the limit" if cut and cut[-1] > 0.5 else ""
        text = (
            f"{rose} while completions went from {number(length[0])} to {number(length[-1])} tokens{at_limit}: see "
            "whether it pays for their length."
        )
        found.append(warn(text, "update", newest, sort="-spread"))
    if kl and kl[-1] > KL_LARGE and kl[-1] > KL_GROWN * max(kl[1], 0.0):
        text = (
            f"{rose} while the KL to the reference ran away, from {number(kl[1])} to {number(kl[-1])} nats per token: "
            "read completions before you believe it."
        )
        found.append(warn(text, "update", newest, sort="-reward"))
    return found


def _nothing_to_learn(metrics: Mapping[str, Points]) -> list[Sentence]:
    equal = _quarters(metrics.get("frac_reward_zero_std"))
    if not equal or equal[-1] < EQUAL:
        return []
    text = f"In {equal[-1]:.0%} of the last groups all rewards are equal: nothing is learnt from them."
    return [warn(text, "update", metrics["frac_reward_zero_std"].steps[-1])]


def _unscored(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Name the rewards that leave completions without a score, or fail."""
    found = []
    for name in metrics:
        if not name.startswith("rewards/"):
            continue
        points = metrics[name]
        reward, _, what = name.removeprefix("rewards/").rpartition("/")
        if what == "unscored" and points.values.any():
            most = int(points.values.argmax())
            text = (
                f"Reward {reward} left {points.values.mean():.1%} of the completions without a score, "
                f"{points.values[most]:.1%} of those of update {points.steps[most]:,.0f}."
            )
            found.append(warn(text, "update", points.steps[most], where=reward, without="1"))
        if what == "failed" and points.values.any():
            text = f"Calls of reward {reward} failed in {np.count_nonzero(points.values):,} updates."
            found.append(
                warn(text, "update", points.steps[points.values.argmax()], where=reward, without="1")
            )
    return found


def _not_finite(metrics: Mapping[str, Points]) -> list[Sentence]:
    missing = {name: points.missing for name, points in metrics.items() if points.missing}
    if not missing:
        return []
    most = max(missing, key=lambda name: missing[name])
    others = f", and of {len(missing) - 1} other metrics" if len(missing) > 1 else ""
    return [warn(f"{missing[most]:,} logged values of {most}{others} were not finite.")]


def _sampler(metrics: Mapping[str, Points]) -> list[Sentence]:
    evidence = metrics.get("sampling/surprisal_evidence")
    if evidence is None or evidence.values[-1] < EVIDENCE:
        return []
    text = (
        "The completions were not sampled from the policy with the recorded sampling options: the evidence against it "
        f"is 10^{evidence.values[-1]:.0f}."
    )
    return [warn(text, "update", evidence.steps[-1])]
