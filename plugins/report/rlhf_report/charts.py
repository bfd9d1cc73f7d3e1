"""Which metrics are drawn together, and in which order; numbers and times as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

EVAL = "eval_"
OTHER = "Other metrics"
EPISODES = "Episodes"


@dataclass(frozen=True)
class ChartKind:
    """One kind of chart. names: patterns of its metrics, with or without `eval_`. log: use a log axis.

    unit: what the values are divided by for the unit in the title.
    """

    group: str
    title: str
    names: tuple[str, ...]
    log: bool = False
    unit: float = 1.0


KINDS = (
    ChartKind("Loss and gradient", "Loss", ("loss",)),
    ChartKind("Loss and gradient", "Gradient norm, before clipping", ("grad_norm",)),
    ChartKind("Loss and gradient", "Gradient norm of each layer", ("grad_norm/*",), log=True),
    ChartKind("Loss and gradient", "Entropy, nats per token", ("entropy",)),
    ChartKind("Reward", "Reward, mean of completions", ("reward", "rewards/*/mean")),
    ChartKind("Reward", "Reward, standard deviation", ("reward_std", "reward_std_all", "rewards/*/std")),
    ChartKind("Reward", "Share of groups whose rewards are all equal", ("frac_reward_zero_std",)),
    ChartKind("Reward", "Failed calls of a reward", ("rewards/*/failed",)),
    ChartKind("Reward", "Share of completions that a reward left unscored", ("rewards/*/unscored",)),
    ChartKind("Reward", "Implicit reward", ("rewards/chosen", "rewards/rejected")),
    ChartKind("Reward", "Log-probability of a completion, nats", ("logps/chosen", "logps/rejected")),
    ChartKind(
        "Reward", "Scores of the pairs: smallest, mean, largest", ("min_reward", "mean_reward", "max_reward")
    ),
    ChartKind("Reward", "Scores of the pairs: mean", ("chosen/mean", "rejected/mean")),
    ChartKind("Reward", "Scores of the pairs: standard deviation", ("chosen/std", "rejected/std")),
    ChartKind("Reward", "Scores of the pairs: extremes", ("chosen/m??", "rejected/m??")),
    ChartKind(
        "Accuracy and calibration",
        "Preference accuracy",
        ("accuracy", "rewards/accuracies", "auc", "accuracy/*"),
    ),
    ChartKind("Accuracy and calibration", "Share of ties", ("ties",)),
    ChartKind("Accuracy and calibration", "Margin, chosen less rejected", ("margin", "rewards/margins")),
    ChartKind("Accuracy and calibration", "Calibration error", ("calibration_error",)),
    ChartKind(
        "Accuracy and calibration",
        "Length as a predictor",
        ("length_correlation", "longer_wins_accuracy", "longer_wins_ties"),
    ),
    ChartKind("Accuracy and calibration", "Pass rate", ("pass@*",)),
    ChartKind("Clip and KL", "KL to the reference, nats per token", ("kl",)),
    ChartKind("Clip and KL", "Share of tokens clipped", ("clip_ratio/*",)),
    ChartKind("Clip and KL", "Sampler against trainer, nats", ("sampling/logp_difference_*",), log=True),
    ChartKind("Clip and KL", "Importance ratio of the sampler", ("sampling/importance_ratio_*",)),
    ChartKind(
        "Clip and KL", "Surprisal of the sampled tokens less entropy, nats per token", ("*/surprisal_gap*",)
    ),
    ChartKind("Clip and KL", "Surprisal less entropy, over its standard error", ("*/surprisal_z*",)),
    ChartKind(
        "Clip and KL",
        "Evidence against the sampler, log10; 9 ends the run",
        ("*/surprisal_evidence*",),
    ),
    ChartKind("Clip and KL", "Share of sampled tokens that the filters leave out", ("sampling/outside*",)),
    ChartKind(
        "Lengths",
        "Completion length, tokens",
        ("completions/mean_length", "completions/mean_terminated_length"),
    ),
    ChartKind(
        "Lengths",
        "Completion length: shortest and longest, tokens",
        ("completions/m??_length", "completions/m??_terminated_length"),
    ),
    ChartKind("Lengths", "Share of completions truncated at the limit", ("completions/clipped_ratio",)),
    ChartKind(EPISODES, "Turns per episode", ("episodes/turns",)),
    ChartKind(EPISODES, "Episodes that failed and are left out", ("episodes/failed",)),
    ChartKind(EPISODES, "Share of episodes cut at a limit", ("episodes/cut_ratio",)),
    ChartKind(EPISODES, "Tokens per episode that the environment added", ("episodes/observation_tokens",)),
    ChartKind("Schedule", "Learning rate", ("learning_rate",)),
    ChartKind("Throughput", "Tokens per second", ("tokens_per_second",)),
    ChartKind("Throughput", "Seconds per update", ("step_time", "time/*")),
    ChartKind("Throughput", "Sampled tokens per second", ("rollout/tokens_per_second",)),
    ChartKind("Throughput", "Share of slots with a token", ("useful_fraction",)),
    ChartKind("Throughput", "Dynamic sampling", ("dynamic_sampling/*",)),
    ChartKind("Throughput", "Memory, GB", ("memory/*",), unit=1e9),
)
COUNTERS = ("num_tokens", "epoch")
"""Metrics that grow linearly: shown in the summary, not drawn."""

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
    "episodes/turns",
    "episodes/failed",
    "tokens_per_second",
    "step_time",
)
"""Metrics of the short table, in this order."""


def base(name: str) -> str:
    return name.removeprefix(EVAL)


def charts(names: Iterable[str]) -> list[tuple[ChartKind, list[str]]]:
    """Group metrics into charts, in the order of KINDS; unknown metrics get a chart each, at the end."""
    left = [name for name in names if base(name) not in COUNTERS]
    grouped: list[tuple[ChartKind, list[str]]] = []
    for kind in KINDS:
        matching = _ordered(left, kind.names)
        if matching:
            grouped.append((kind, matching))
            left = [name for name in left if name not in matching]
    others: dict[str, list[str]] = {}
    for name in left:
        others.setdefault(base(name), []).append(name)
    for name, metrics in others.items():
        group = EPISODES if name.startswith("episodes/") else OTHER
        grouped.append((ChartKind(group, name, (name,)), metrics))
    return grouped


def key_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics of the short table, the most important first, without `eval_`."""
    return list(dict.fromkeys(base(name) for name in _ordered(names, KEY)))


def number(value: float | None) -> str:
    """Format a number for a table, short enough for a card: 0.9993, 9,709, 3.00e-04, 1.14e+08."""
    if value is None:
        return "–"
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e6):
        return f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def quantity(value: float | None, name: str) -> str:
    """Format a metric's value for a table, bytes as GB."""
    if value is not None and base(name).startswith("memory/"):
        return f"{value / 1e9:.2f} GB"
    return number(value)


def clock(seconds: float) -> str:
    """Format seconds as 41 s, 2 min 11 s or 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def flat(value: object, key: str = "") -> Mapping[str, object]:
    """Return {dotted path: leaf} of a configuration."""
    if isinstance(value, Mapping) and value:
        items = [(f"{key}.{k}" if key else str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(f"{key}[{i}]", v) for i, v in enumerate(value)]
    else:
        return {key: value}
    return {k: v for name, item in items for k, v in flat(item, name).items()}


def _ordered(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names that match a pattern, in the order of the patterns; `eval_NAME` follows NAME."""
    ranks = [
        (rank, base(name), name.startswith(EVAL), name)
        for name in names
        if (rank := next((i for i, p in enumerate(patterns) if fnmatchcase(base(name), p)), None)) is not None
    ]
    return [name for *_, name in sorted(ranks)]
