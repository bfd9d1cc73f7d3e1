"""How far a stage is and how long it will take, and numbers in words that fit a terminal."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

HOUSEKEEPING = ("learning_rate", "epoch", "num_tokens", "tokens_per_second", "useful_fraction", "step_time")
UNSHOWN = ("time/", "rollout/", "completions/min_", "completions/max_", "completions/mean_terminated_")
"""How names begin that the console leaves to metrics.jsonl and the report."""
HEADLINE = ("loss", "reward", "accuracy")


class Pace:
    """Updates done and to do, the time they take, and which metrics say how it goes, of one run of a stage."""

    def __init__(self, plan: Path, names: Sequence[str] = HEADLINE) -> None:
        """plan: {"updates": how many the stage has}, a file that appears before the first update. names: of metrics."""
        self.names = names
        self.began = time.monotonic()
        self.step = 0
        self.total: int | None = None
        self._plan = plan
        self._marks: deque[tuple[int, float]] = deque(maxlen=20)
        self._seconds_each: float | None = None

    def mark(self, step: int) -> None:
        """Note that `step` updates are done."""
        if self.total is None and self._plan.exists():
            self.total = int(json.loads(self._plan.read_text())["updates"])
        self.step = step
        self._marks.append((step, time.monotonic()))
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        # Not before the second mark: up to the first, programs were compiled too.
        self._seconds_each = (now - then) / (last - first) if last > first else None

    def seconds(self) -> float:
        """Since the stage began."""
        return time.monotonic() - self.began

    def seconds_left(self) -> float | None:
        """Until the last update, at the pace of the last twenty logged steps; None before that is known."""
        if self.total is None or self._seconds_each is None:
            return None
        due = self._marks[-1][1] + (self.total - self.step) * self._seconds_each
        return max(due - time.monotonic(), 0.0)

    def count(self) -> str:
        """`120/400`, padded so that a column of them lines up."""
        return str(self.step) if self.total is None else f"{self.step:>{len(str(self.total))}}/{self.total}"

    def left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"{clock(seconds)} left"

    def headline(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """(name, number) of the few metrics that say whether it works."""
        return [(name, number(metrics[name])) for name in self.names if name in metrics]


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(x: float) -> str:
    """Four digits in at most nine characters: `0.01230`, `12.30`, `1,234`, `45.6k`, `1.00e-05`."""
    if not math.isfinite(x) or x == 0:
        return f"{x:g}"
    size = abs(x)
    if size >= 999.95e9 or size < 1e-3:
        return f"{x:.2e}"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit * 0.99995, 9999.5):
            return f"{x / unit:.1f}{letter}"
    return f"{x:,.0f}" if size >= 999.95 else f"{x:#.4g}"


def speed(metrics: Mapping[str, float]) -> str:
    return f"{number(metrics['tokens_per_second'])} tok/s" if "tokens_per_second" in metrics else ""


def details(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(name, number) of every metric that is about learning, without the `eval_` in front."""
    plain = {name.removeprefix("eval_"): x for name, x in metrics.items()}
    shown = {name: x for name, x in plain.items() if not (name in HOUSEKEEPING or name.startswith(UNSHOWN))}
    return [(name, number(x)) for name, x in shown.items()]


def shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
