"""The verdict on a stage, a sentence for each thing that a reader should know first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import rlhf_report.samples as samples
from rlhf_report.charts import number
from rlhf_report.run_reader import Points, ReportedStage
from rlhf_report.summary import ACCURACIES, summary, t_quantile

LEAST = 8
"""Logged rows below which nothing is said of a trend."""
PATIENCE = 30
"""Logged rows below which it is not said that nothing was learnt."""
GROWN = 1.5
"""The last quarter's mean completion length over the first's, from which it is said with a growing reward."""
KL_GROWN, KL_LARGE = 3.0, 0.1
"""The last quarter's mean KL over that of an earlier one, and nats per token, from which both together are said."""
FAR = 1.0
"""Nats per token to the reference that no useful policy is away: its tokens are e times as likely as they were."""
STILL = 1e-5
"""Nats per token to the reference below which a policy has hardly moved."""
SOON = 10
"""Updates within which a policy that gets `KL_LARGE` away has steps that are too large; one that drifts takes more."""
COLLAPSED = 0.1
"""The last quarter's mean entropy over the first value, below which a policy has collapsed that is far or no better."""
ERRORS = 3.0
"""Standard errors by which quarters differ for sure; more than two, for neighbouring updates are alike."""
LEAPT = 2.0
"""The mean loss of three logged rows over the first one: a loss begins at what guessing gives; a row is noisy."""
EQUAL = 0.8
"""The share of groups with equal rewards from which it is said that nothing is learnt."""
CUT = 0.5
"""The share of the last quarter's completions that are cut, from which it is said."""
GUESSED, REVERSED = 0.55, 0.4
"""The accuracy below which nothing was learnt of pairs, and of held-out pairs, below which they disagree."""
EVIDENCE = 9.0
"""log10 of the evidence against the sampler from which it is said: one in a billion by chance."""

HARM, DOUBT, NOTE = 3, 2, 1
"""Weights of warnings: training did harm; the result may not be what it seems; worth knowing."""


@dataclass(frozen=True)
class Sentence:
    """A sentence of a verdict.

    tone: "warning" for what may be wrong, "checked" for what was looked at and found well. see: where it shows, the
    `kind` of a view, "update", "rows" or "evaluation", the `update`, of those that were kept the nearest, and the
    `query` of its address; None without one. weight: of a warning, the heaviest comes first.
    """

    text: str
    tone: Literal["", "warning", "checked"] = ""
    see: Mapping[str, Any] | None = None
    weight: int = 0


def warn(text: str, weight: int, kind: str = "", update: float | None = None, **query: str) -> Sentence:
    """Make a sentence on what may be wrong, and where it shows; no kind: nowhere; no update: the newest."""
    return Sentence(text, "warning", _place(kind, update, query) if kind else None, weight)


def well(text: str) -> Sentence:
    """Make a sentence on what was looked at and found well."""
    return Sentence(text, "checked")


def _place(kind: str, update: float | None, query: Mapping[str, str]) -> Mapping[str, Any]:
    return {"kind": kind, "update": None if update is None else int(update), "query": query}


def verdict(stage: ReportedStage, problems: list[str], evidence: Sequence[Sentence] = ()) -> list[Sentence]:
    """Return the sentences on a stage in the order in which they should be read.

    First what did harm or puts the result in doubt, then the result on held-out data and which model was saved, then
    what is worth knowing, and last what was found well. problems: files that cannot be read are added. evidence: what
    other files say, of `evidence.py`.
    """
    found = [*evidence, *checks(stage.metrics)]
    warned = warnings(found)
    heavy = [each for each in warned if each.weight > NOTE]
    evaluations = samples.evaluations(stage, problems)
    shown = samples.fixed_prompts(stage, problems, "evaluation")
    result = summary(stage, evaluations, shown, is_doubtful=any(each.weight == DOUBT for each in heavy))
    told = [Sentence(text) for text in (result, _saved(stage)) if text]
    others = [each for each in found if each.tone != "warning"]
    return [*heavy, *told, *warned[len(heavy) :], *sorted(others, key=lambda each: each.tone)]


def warnings(found: Sequence[Sentence]) -> list[Sentence]:
    """Return the warnings among sentences, the heaviest first."""
    return sorted((each for each in found if each.tone == "warning"), key=lambda each: -each.weight)


def checks(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Return what the metrics alone say, a warning or that it is well for each thing that they can tell."""
    course = _course(metrics)
    if course is None:
        trained = _diverged(metrics)
    else:
        trained = [*_broken(metrics, course), *_running_away(metrics, course), *_traded(metrics, course)]
    return [
        *trained,
        *_accuracy(metrics),
        *_overfitting(metrics),
        *_unscored(metrics),
        *_cut(metrics),
        *_nothing_to_learn(metrics),
        *_not_finite(metrics),
        *_sampler(metrics),
    ]


def _saved(stage: ReportedStage) -> str:
    if stage.saved is None:
        return ""
    return f"The saved model is that of update {stage.saved:,}, the best evaluation."


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


@dataclass(frozen=True)
class Course:
    """How a policy went: the change of its reward, with its standard error, and its distance to the reference.

    first, last: the mean rewards of the first and last quarter. kl: nats per token in each quarter, empty if not known.
    """

    first: float
    last: float
    error: float
    kl: Sequence[float]

    @property
    def has_fallen(self) -> bool:
        return self.first - self.last > ERRORS * self.error

    @property
    def has_risen(self) -> bool:
        return self.last - self.first > ERRORS * self.error

    @property
    def is_lost(self) -> bool:
        """Whether it has gone far from the reference, or ever farther, and the reward has not risen."""
        has_moved = bool(self.kl) and self.kl[-1] > KL_LARGE and self.kl[-1] > KL_GROWN * self.kl[0]
        return (has_moved or self.is_far) and not self.has_risen

    @property
    def is_far(self) -> bool:
        return bool(self.kl) and self.kl[-1] > FAR


def _course(metrics: Mapping[str, Points]) -> Course | None:
    """Return how a policy went; None for other models, and where too little is logged."""
    change = _change(metrics.get("reward"))
    return None if change is None else Course(*change, _quarters(metrics.get("kl")))


def _broken(metrics: Mapping[str, Points], course: Course) -> list[Sentence]:
    """Say whether training made a policy worse, or it collapsed, and what speaks for the cause."""
    found = [*_entropy(metrics, course), _reward(metrics, course), *_distance(metrics, course)]
    bad = [each for each in found if each.weight == HARM]
    others = [each for each in found if each.weight != HARM]
    if not bad:
        return others
    text = " ".join([*(each.text for each in bad), _steps(metrics)])
    return [Sentence(text, "warning", bad[0].see, HARM), *others]


def _entropy(metrics: Mapping[str, Points], course: Course) -> list[Sentence]:
    points = metrics.get("entropy")
    quarters = _quarters(metrics.get("entropy"))
    if points is None or not quarters:
        return []
    began = float(points.values[0])
    now = quarters[-1]
    went = f"entropy went from {number(began)} nats per token to {number(now)}"
    low = points.steps[points.values < COLLAPSED * began]
    may_collapse = course.is_far or not course.has_risen  # else it has learnt its task
    if not may_collapse or not len(low) or now >= COLLAPSED * began:
        return [well(f"The policy's {went}.")]
    text = f"The policy collapsed: its {went}, below a tenth first at update {low[0]:,.0f}."
    return [warn(text, HARM, "update", low[0])]


def _reward(metrics: Mapping[str, Points], course: Course) -> Sentence:
    went = f"from {number(course.first)} in the first quarter of the updates to {number(course.last)} in the last"
    newest = metrics["reward"].steps[-1]
    if course.has_fallen:
        return warn(f"The reward fell {went}.", HARM, "update", newest)
    if course.is_lost:
        return warn(f"The reward did not rise by more than chance: it went {went}.", HARM, "update", newest)
    return well(f"The reward went {went}.")


def _distance(metrics: Mapping[str, Points], course: Course) -> list[Sentence]:
    if not course.kl:
        return []
    points = metrics["kl"]
    rate = metrics.get("learning_rate")
    away = f"The policy is {number(course.kl[-1])} nats per token away from the reference"
    if course.is_lost:
        return [warn(f"{away}, and no better for it.", HARM, "update", points.steps[-1])]
    equal = _quarters(metrics.get("frac_reward_zero_std"))
    has_lessons = not equal or equal[-1] < EQUAL
    if course.has_risen or course.kl[-1] >= STILL or len(points.values) < PATIENCE or not has_lessons:
        return [well(f"{away}.")]
    most = "" if rate is None else f", with a learning_rate of at most {rate.values.max():.3g}"
    return [warn(f"{away}{most}: it has hardly moved.", NOTE)]


def _steps(metrics: Mapping[str, Points]) -> str:
    """Say what the distance to the reference tells of the steps of a policy that got no better."""
    kl = metrics.get("kl")
    if kl is None:
        return "Steps that are too large do this: try a lower learning_rate."
    far = kl.steps[kl.values > KL_LARGE]
    if not len(far):
        return (
            f"Its distance to the reference was {number(float(kl.values.max()))} nats per token at most, so its steps "
            "were not too large: see what the rewards pay for."
        )
    rate = _value_at(metrics, "learning_rate", far[0])
    with_rate = "" if rate is None else f", with a learning_rate of {rate:.3g},"
    away = f"more than {KL_LARGE} nats per token away from the reference"
    if far[0] - kl.steps[0] < SOON:
        return (
            f"By update {far[0]:,.0f}{with_rate} it was already {away}: steps of this size are too large, try a lower "
            "learning_rate."
        )
    return (
        f"It drifted: by update {far[0]:,.0f}{with_rate} it was {away}, and it went on. A lower learning_rate or a "
        "stronger kl would hold it."
    )


def _diverged(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say whether the training loss rose, or was far above its beginning for a while."""
    points = metrics.get("loss")
    change = _change(points)
    if points is None or change is None:
        return []
    first, last, error = change
    went = f"from {number(first)} in the first quarter of the updates to {number(last)} in the last"
    if last - first > ERRORS * error:
        text = f"The training loss rose {went}. {_strides(metrics, points.steps[-1])}"
        return [warn(text, HARM, "rows", points.steps[-1])]
    began = float(points.values[0])
    means = np.convolve(points.values, np.full(3, 1 / 3), "valid")
    most = int(means.argmax())
    if means[most] > LEAPT * began > 0:
        at = points.steps[most + 1]
        text = (
            f"The training loss leapt from {number(began)} to {number(float(means[most]))} near update {at:,.0f}. "
            f"{_strides(metrics, at)}"
        )
        return [warn(text, HARM, "rows", at)]
    return [well(f"The training loss went {went}.")]


def _strides(metrics: Mapping[str, Points], update: float) -> str:
    """Say how large the steps were at an update at which the loss had risen."""
    rate, norm = (_value_at(metrics, name, update) for name in ("learning_rate", "grad_norm"))
    if rate is None:
        return "Steps that are too large do this: try a lower learning_rate."
    said = f"The learning_rate was {rate:.3g} then"
    if norm is not None:
        first = float(metrics["grad_norm"].values[0])
        said += f", and the norm of the gradient {number(norm)}, after {number(first)} at first"
    return f"{said}: steps that are too large do this, try a lower learning_rate."


def _value_at(metrics: Mapping[str, Points], name: str, update: float) -> float | None:
    """Return the newest value of a metric up to an update; None where there is none."""
    points = metrics.get(name)
    return None if points is None else points.value_at(int(update))


def _running_away(metrics: Mapping[str, Points], course: Course) -> list[Sentence]:
    """Say whether the reward grew with the completions' length, or with the distance to the reference."""
    length = _quarters(metrics.get("completions/mean_length"))
    found, newest = [], metrics["reward"].steps[-1]
    has_risen, kl = course.has_risen, course.kl
    rose = f"The reward rose from {number(course.first)} to {number(course.last)}"
    if length:
        went = f"went from {number(length[0])} to {number(length[-1])} tokens"
        if has_risen and (length[-1] > GROWN * length[0] or length[-1] * GROWN < length[0]):
            text = f"{rose} while completions {went}: see whether it pays for their length."
            found.append(warn(text, DOUBT, "update", newest, sort="-spread"))
        else:
            found.append(well(f"Completions {went}."))
    if kl and has_risen and kl[-1] > KL_LARGE and kl[-1] > KL_GROWN * max(kl[1], 0.0):
        text = (
            f"{rose} while the KL to the reference ran away, from {number(kl[1])} to {number(kl[-1])} nats per token: "
            "read completions before you believe it."
        )
        found.append(warn(text, DOUBT, "update", newest, sort="-reward"))
    return found


def _traded(metrics: Mapping[str, Points], course: Course) -> list[Sentence]:
    """Name the rewards that fell while their weighted sum rose."""
    found = []
    for name in metrics:
        reward = name.removeprefix("rewards/").removesuffix("/mean")
        change = _change(metrics[name]) if name == f"rewards/{reward}/mean" else None
        if change is None or not course.has_risen:
            continue
        first, last, error = change
        if first - last > ERRORS * error:
            text = (
                f"Reward {reward} fell from {number(first)} to {number(last)} while the weighted sum of the rewards "
                "rose: see whether its weight is meant so."
            )
            found.append(warn(text, NOTE, "update", metrics[name].steps[-1], sort="-reward"))
    return found


def _accuracy(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say whether a model tells chosen from rejected, held out or, where nothing is, in training."""
    found = []
    for held_out in ACCURACIES:
        judged = metrics.get(held_out)
        trained = metrics.get(held_out.removeprefix("eval_"))
        quarters = _quarters(trained)
        if trained is None or not quarters or len(trained.values) < PATIENCE:
            continue
        right = f"In {quarters[-1]:.1%} of the training pairs of the last quarter the chosen reply has the higher score"
        share, kind, seen = quarters[-1], "rows", trained.steps[-1]
        if judged is not None and len(judged.values) > 1:
            share = float(judged.values[-1])
            kind = "evaluation"
            seen = judged.steps[-1]
            right += f", and in {share:.1%} of the held-out pairs"
        wrong = "chosen and rejected the wrong way round"
        if share < REVERSED:
            found.append(
                warn(f"{right}: worse than guessing. See whether either has {wrong}.", HARM, kind, seen)
            )
        elif share < GUESSED:
            text = f"{right}; guessing gives 50%. See whether some of the training pairs have {wrong}."
            found.append(warn(text, HARM, kind, seen))
        else:
            found.append(well(f"{right}."))
    return found


def _overfitting(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say whether the held-out loss has risen since its lowest value while the training loss has fallen."""
    held_out, train = metrics.get("eval_loss"), metrics.get("loss")
    if held_out is None or train is None or len(held_out.values) < 3 or len(train.values) < LEAST:
        return []
    least = int(held_out.values.argmin())
    low = float(held_out.values[least])
    last = float(held_out.values[-1])
    since = train.values[train.steps > held_out.steps[least]]
    when = f"update {held_out.steps[least]:,.0f}"
    if (
        last <= low + 0.02 * abs(low)
        or len(since) < 4
        or since[-len(since) // 2 :].mean() >= since[: len(since) // 2].mean()
    ):
        return [well(f"The lowest held-out loss was {number(low)}, after {when}; it is {number(last)} now.")]
    text = (
        f"It overfits: the held-out loss was lowest, {number(low)}, after {when} and is {number(last)} now, while the "
        "training loss went on falling."
    )
    return [warn(text, HARM, "evaluation", held_out.steps[-1])]


def _cut(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Say whether most completions are cut at the limit."""
    cut = _quarters(metrics.get("completions/clipped_ratio"))
    longest = metrics.get("completions/max_length")
    if not cut:
        return []
    text = f"In the last quarter of the updates {cut[-1]:.0%} of the completions are cut"
    if cut[-1] < CUT:
        return [well(f"{text} at the limit.")]
    points = metrics["completions/clipped_ratio"]
    limit = "the limit" if longest is None else f"{longest.values[-1]:,.0f} tokens"
    text += f" at {limit}, against {points.values[0]:.0%} at first, and are judged without their end: "
    were_cut = points.values[0] >= CUT
    text += "sampling.max_completion_length is too small." if were_cut else "see why they no longer end."
    return [warn(text, DOUBT, "update", points.steps[-1], finish="length")]


def _nothing_to_learn(metrics: Mapping[str, Points]) -> list[Sentence]:
    equal = _quarters(metrics.get("frac_reward_zero_std"))
    if not equal:
        return []
    text = f"In {equal[-1]:.0%} of the last groups all rewards are equal"
    if equal[-1] < EQUAL:
        return [well(f"{text}.")]
    newest = metrics["frac_reward_zero_std"].steps[-1]
    return [warn(f"{text}: nothing is learnt from them.", NOTE, "update", newest)]


def _unscored(metrics: Mapping[str, Points]) -> list[Sentence]:
    """Name the rewards that leave completions without a score, or fail."""
    found = []
    for name in metrics:
        if not name.startswith("rewards/"):
            continue
        points = metrics[name]
        reward, _, what = name.removeprefix("rewards/").rpartition("/")
        if what not in ("unscored", "failed"):
            continue
        most = points.steps[points.values.argmax()]
        if what == "unscored" and points.values.any():
            text = (
                f"Reward {reward} left {points.values.mean():.1%} of the completions without a score, "
                f"{points.values.max():.1%} of those of update {most:,.0f}."
            )
            found.append(warn(text, DOUBT, "update", most, where=reward, without="1"))
        elif what == "unscored":
            found.append(well(f"Reward {reward} gave every completion a score."))
        elif points.values.any():
            text = f"Calls of reward {reward} failed in {np.count_nonzero(points.values):,} updates."
            found.append(warn(text, DOUBT, "update", most, where=reward, without="1"))
    return found


def _not_finite(metrics: Mapping[str, Points]) -> list[Sentence]:
    missing = {name: points.missing for name, points in metrics.items() if points.missing}
    if not missing:
        return [well(f"All values of the {len(metrics):,} metrics are finite.")] if metrics else []
    most = max(missing, key=lambda name: missing[name])
    others = f", and of {len(missing) - 1} other metrics" if len(missing) > 1 else ""
    return [warn(f"{missing[most]:,} logged values of {most}{others} were not finite.", NOTE)]


def _sampler(metrics: Mapping[str, Points]) -> list[Sentence]:
    evidence = metrics.get("sampling/surprisal_evidence")
    if evidence is None:
        return []
    power = f"10^{evidence.values[-1]:.0f}"
    if evidence.values[-1] < EVIDENCE:
        return [
            well(f"The completions fit the policy that sampled them: the evidence against it is {power}.")
        ]
    text = (
        "The completions were not sampled from the policy with the recorded sampling options: the evidence against it "
        f"is {power}."
    )
    return [warn(text, DOUBT, "update", evidence.steps[-1])]
