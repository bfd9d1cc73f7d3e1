"""Which metrics stand together in a chart, and which charts in a group; and how a number is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

EVAL = "eval_"
OTHER = "Other metrics"


@dataclass(frozen=True)
class Kind:
    """One chart. names: of its metrics, `*` for any; each may have `eval_` in front. log: drawn on a log axis."""

    group: str
    title: str
    names: tuple[str, ...]
    log: bool = False


KINDS = (
    Kind("Loss and gradient", "Loss", ("loss",)),
    Kind("Loss and gradient", "Gradient norm, before clipping", ("grad_norm",)),
    Kind("Loss and gradient", "Entropy, nats a token", ("entropy",)),
    Kind("Reward", "Reward, mean of completions", ("reward", "rewards/*/mean")),
    Kind("Reward", "Reward, standard deviation", ("reward_std", "reward_std_all", "rewards/*/std")),
    Kind("Reward", "Share of groups whose rewards are all equal", ("frac_reward_zero_std",)),
    Kind("Reward", "Calls of a reward that failed", ("rewards/*/failed",)),
    Kind("Reward", "Implicit reward", ("rewards/chosen", "rewards/rejected")),
    Kind("Reward", "Log-probability of a completion, nats", ("logps/chosen", "logps/rejected")),
    Kind("Reward", "Scores of the pairs: least, mean, largest", ("min_reward", "mean_reward", "max_reward")),
    Kind("Reward", "Scores of the pairs: mean", ("chosen/mean", "rejected/mean")),
    Kind("Reward", "Scores of the pairs: standard deviation", ("chosen/std", "rejected/std")),
    Kind("Reward", "Scores of the pairs: extremes", ("chosen/m??", "rejected/m??")),
    Kind(
        "Accuracy and calibration",
        "Preference accuracy",
        ("accuracy", "rewards/accuracies", "auc", "accuracy/*"),
    ),
    Kind("Accuracy and calibration", "Share of ties", ("ties",)),
    Kind("Accuracy and calibration", "Margin, chosen less rejected", ("margin", "rewards/margins")),
    Kind("Accuracy and calibration", "Calibration error", ("calibration_error",)),
    Kind(
        "Accuracy and calibration",
        "What length alone tells",
        ("length_correlation", "longer_wins_accuracy", "longer_wins_ties"),
    ),
    Kind("Accuracy and calibration", "Pass rate", ("pass@*",)),
    Kind("Clip and KL", "KL to the reference, nats a token", ("kl",)),
    Kind("Clip and KL", "Share of tokens clipped", ("clip_ratio/*",)),
    Kind("Clip and KL", "Sampler against trainer, nats", ("sampling/logp_difference_*",), log=True),
    Kind("Clip and KL", "Importance ratio of the sampler", ("sampling/importance_ratio_*",)),
    Kind("Lengths", "Completion length, tokens", ("completions/*length",)),
    Kind("Lengths", "Share of completions cut at the limit", ("completions/clipped_ratio",)),
    Kind("Schedule", "Learning rate", ("learning_rate",)),
    Kind("Throughput", "Tokens a second", ("tokens_per_second",)),
    Kind("Throughput", "Seconds an update", ("step_time", "time/*")),
    Kind("Throughput", "Sampled tokens a second", ("rollout/tokens_per_second",)),
    Kind("Throughput", "Share of slots that hold a token", ("useful_fraction",)),
    Kind("Throughput", "Dynamic sampling", ("dynamic_sampling/*",)),
    Kind("Throughput", "Memory, bytes", ("memory/*",)),
)
COUNTERS = ("num_tokens", "epoch")
"""Straight lines by what they are: told in the summary, not drawn."""

KEY = (
    "loss",
    "accuracy",
    "rewards/accuracies",
    "auc",
    "calibration_error",
    "margin",
    "rewards/margins",
    "reward",
    "rewards/*/mean",
    "reward_std",
    "frac_reward_zero_std",
    "kl",
    "entropy",
    "completions/mean_length",
    "completions/clipped_ratio",
    "tokens_per_second",
    "step_time",
)
"""What the short table shows, in this order."""


def base(name: str) -> str:
    return name.removeprefix(EVAL)


def charts(names: Iterable[str]) -> list[tuple[Kind, list[str]]]:
    """Every chart that has metrics among `names`, in the order of the groups; unknown ones, one chart each, last."""
    left = [name for name in names if base(name) not in COUNTERS]
    found: list[tuple[Kind, list[str]]] = []
    for kind in KINDS:
        if own := _ordered(left, kind.names):
            found.append((kind, own))
            left = [name for name in left if name not in own]
    others: dict[str, list[str]] = {}
    for name in left:
        others.setdefault(base(name), []).append(name)
    return found + [(Kind(OTHER, name, (name,)), own) for name, own in others.items()]


def key_metrics(names: Iterable[str]) -> list[str]:
    """The metrics of the short table, most telling first, without `eval_` in front."""
    return list(dict.fromkeys(base(name) for name in _ordered(names, KEY)))


def number(value: float | None) -> str:
    """Four significant digits, in words a table can hold: 0.9993, 9,709, 3.0e-04."""
    if value is None:
        return "–"
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e9):
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def clock(seconds: float) -> str:
    """41 s, 2 min 11 s, 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def flat(value: object, key: str = "") -> Mapping[str, object]:
    """{dotted path: leaf} of a configuration."""
    if isinstance(value, Mapping) and value:
        items = [(f"{key}.{k}" if key else str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {key: value}
    return {k: v for name, item in items for k, v in flat(item, name).items()}


def _ordered(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    """Those that a pattern fits, by pattern; `eval_` after what it is in front of."""
    ranks = [
        (rank, base(name), name.startswith(EVAL), name)
        for name in names
        if (rank := next((i for i, p in enumerate(patterns) if fnmatchcase(base(name), p)), None)) is not None
    ]
    return [name for *_, name in sorted(ranks)]
