"""The verdict on a stage, a sentence for each thing that a reader should know first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import rlhf_report.samples as samples
from rlhf_report.charts import number
from rlhf_report.run_reader import Points, ReportedStage
from rlhf_report.summary import summary

LEAST = 8
"""Logged rows below which nothing is said of a trend."""
GROWN = 1.5
"""The last quarter's mean completion length over the first's, from which it is said with a growing reward."""
KL_GROWN, KL_LARGE = 3.0, 0.1
"""The last quarter's mean KL over the second quarter's, and nats per token, from which both together are said."""
EVIDENCE = 9.0
"""log10 of the evidence against the sampler from which it is said: one in a billion by chance."""


def verdict(stage: ReportedStage, problems: list[str]) -> list[str]:
    """Return the sentences, what the stage changed on held-out data first.

    problems: files that cannot be read are added.
    """
    evaluations = samples.evaluations(stage, problems)
    shown = samples.fixed_prompts(stage, problems, "evaluation")
    found = [
        summary(stage, evaluations, shown),
        _saved(stage),
        _overfitting(stage.metrics),
        *_running_away(stage.metrics),
        _nothing_to_learn(stage.metrics),
        *_unscored(stage.metrics),
        _not_finite(stage.metrics),
        _sampler(stage.metrics),
    ]
    return [sentence for sentence in found if sentence]


def _saved(stage: ReportedStage) -> str:
    if stage.saved is None:
        return ""
    return f"The saved model is that of update {stage.saved:,}, the best evaluation."


def _overfitting(metrics: Mapping[str, Points]) -> str:
    """Say that the held-out loss has risen since its lowest value while the training loss has fallen."""
    held_out, train = metrics.get("eval_loss"), metrics.get("loss")
    if held_out is None or train is None or len(held_out.values) < 3 or len(train.values) < LEAST:
        return ""
    least = int(held_out.values.argmin())
    low, last = float(held_out.values[least]), float(held_out.values[-1])
    since = train.values[train.steps > held_out.steps[least]]
    if (
        last <= low + 0.02 * abs(low)
        or len(since) < 4
        or since[-len(since) // 2 :].mean() >= since[: len(since) // 2].mean()
    ):
        return ""
    return (
        f"It overfits: the held-out loss was lowest, {number(low)}, after update {held_out.steps[least]:,.0f} and is "
        f"{number(last)} now, while the training loss went on falling."
    )


def _quarters(points: Points | None) -> list[float]:
    """Return the means of four parts of a curve; empty where it is too short."""
    if points is None or len(points.values) < LEAST:
        return []
    return [float(part.mean()) for part in np.array_split(points.values, 4)]


def _running_away(metrics: Mapping[str, Points]) -> list[str]:
    """Say that the reward grew with the completions' length, or with the distance to the reference."""
    reward, length, kl = (_quarters(metrics.get(n)) for n in ("reward", "completions/mean_length", "kl"))
    if not reward or reward[-1] <= reward[0]:
        return []
    found = []
    rose = f"The reward rose from {number(reward[0])} to {number(reward[-1])}"
    if length and (length[-1] > GROWN * length[0] or length[-1] * GROWN < length[0]):
        found.append(
            f"{rose} while completions went from {number(length[0])} to {number(length[-1])} tokens: see whether it "
            "pays for their length."
        )
    if kl and kl[-1] > KL_LARGE and kl[-1] > KL_GROWN * max(kl[1], 0.0):
        found.append(
            f"{rose} while the KL to the reference ran away, from {number(kl[1])} to {number(kl[-1])} nats per token: "
            "read completions before you believe it."
        )
    return found


def _nothing_to_learn(metrics: Mapping[str, Points]) -> str:
    equal = _quarters(metrics.get("frac_reward_zero_std"))
    if not equal or equal[-1] < 0.8:
        return ""
    return f"In {equal[-1]:.0%} of the last groups all rewards are equal: nothing is learnt from them."


def _unscored(metrics: Mapping[str, Points]) -> list[str]:
    """Name the rewards that leave completions without a score, or fail."""
    found = []
    for name, points in metrics.items():
        if not name.startswith("rewards/") or name.startswith("eval_"):
            continue
        reward, _, what = name.removeprefix("rewards/").rpartition("/")
        if what == "unscored" and points.values[-1] > 0:
            found.append(
                f"Reward {reward} left {points.values[-1]:.1%} of the last completions without a score."
            )
        if what == "failed" and points.values.sum() > 0:
            found.append(f"Calls of reward {reward} failed.")
    return found


def _not_finite(metrics: Mapping[str, Points]) -> str:
    missing = {name: points.missing for name, points in metrics.items() if points.missing}
    if not missing:
        return ""
    most = max(missing, key=lambda name: missing[name])
    others = f", and of {len(missing) - 1} other metrics" if len(missing) > 1 else ""
    return f"{missing[most]:,} logged values of {most}{others} were not finite."


def _sampler(metrics: Mapping[str, Points]) -> str:
    evidence = metrics.get("sampling/surprisal_evidence")
    if evidence is None or evidence.values[-1] < EVIDENCE:
        return ""
    return (
        "The completions were not sampled from the policy with the recorded sampling options: the evidence against it "
        f"is 10^{evidence.values[-1]:.0f}."
    )
