"""Show the running stage, its progress and its metrics in the terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.columns import Columns
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text
from tqdm import tqdm

from rlhf_core.data.records import named_sets
from rlhf_core.errors import UNREADABLE, Stopped, counted
from rlhf_core.loggers.jsonl import strict
from rlhf_core.plugins.hooks import hookimpl
from rlhf_core.runtime.background import compiling
from rlhf_core.runtime.compiled import compiled_so_far
from rlhf_core.runtime.terminal import SafeConsole, escape_control

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.contracts import Artifact
    from rlhf_core.stage import Stage


HOUSEKEEPING = ("learning_rate", "epoch", "num_tokens", "tokens_per_second", "useful_fraction", "step_time")
UNSHOWN = ("time/", "rollout/", "completions/min_", "completions/max_", "completions/mean_terminated_")
"""Prefixes of metrics that only metrics.jsonl and the report show."""
EXTREMES = ("max_", "min_")
"""Prefixes of metrics that are shown only with `verbose`."""
HEADLINE = ("loss", "reward", "accuracy")
MOST_SHOWN = 4
"""Metrics of an evaluation, or of the last training step, that are shown without `verbose`."""


class Pace:
    """Track a stage's updates, the time they take, and the metrics to show with them."""

    def __init__(
        self,
        plan: Path,
        names: Sequence[str] = HEADLINE,
        *,
        sets: Sequence[str] = (),
        verbose: bool = False,
    ) -> None:
        """plan: a file {"updates": total}, written before the first update. names: metrics of the headline.

        sets: names of several sets that are evaluated, with which their metrics begin. verbose: show every metric,
        and at the end what was compiled.
        """
        self.names, self.sets, self.verbose = names, sets, verbose
        self.began, self._compiled = time.monotonic(), compiled_so_far()
        self.step = 0
        self.total: int | None = None
        self._plan = plan
        self._marks: deque[tuple[int, float]] = deque(maxlen=20)
        self._seconds_each: float | None = None

    def mark(self, step: int) -> None:
        """Record that `step` updates are done."""
        if self.total is None and self._plan.exists():
            with suppress(*UNREADABLE):
                self.total = int(json.loads(self._plan.read_text())["updates"])
        self.step = step
        self._marks.append((step, time.monotonic()))
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        # Time counts from the first mark: before it, programs were compiled.
        self._seconds_each = (now - then) / (last - first) if last > first else None

    def seconds(self) -> float:
        """Return the seconds since the stage began."""
        return time.monotonic() - self.began

    def seconds_left(self) -> float | None:
        """Estimate the seconds to the last update, from the last twenty logged steps.

        None before two of them, and while programs are compiled, which takes longer than any update.
        """
        if self.total is None or self._seconds_each is None or compiling():
            return None
        due = self._marks[-1][1] + (self.total - self.step) * self._seconds_each
        return max(due - time.monotonic(), 0.0)

    def count(self) -> str:
        """Return `120/400`, padded so that lines align."""
        return str(self.step) if self.total is None else f"{self.step:>{len(str(self.total))}}/{self.total}"

    def ended(self, how: Ending) -> str:
        """Say how long the stage took; only one that is done was logged at its last update."""
        took = f"in {clock(self.seconds())}"
        if self.verbose:
            took += f"; compiled {compiled_so_far().since(self._compiled)}"
        if how == "done":
            return f"{counted(self.step, 'updates')} {took}"
        return f"{how} {took}" + (f", last logged update {self.count().strip()}" if self.step else "")

    def left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"{clock(seconds)} left"


def clock(seconds: float) -> str:
    """Format seconds as `0:07`, `12:34` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(x: float) -> str:
    """Format a number with four digits in at most nine characters: `0.01230`, `1,234`, `45.6k`, `1.00e-05`."""
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


def details(metrics: Mapping[str, float], pace: Pace) -> list[tuple[str, str]]:
    """Return (name, number) of metrics about learning, without the prefix `eval_`: of each set those that matter most.

    They are the headline's, then the next in the order that they were reported in.
    """
    plain = {name.removeprefix("eval_"): x for name, x in metrics.items()}
    about = [name for name in plain if not (name in HOUSEKEEPING or name.startswith(UNSHOWN))]
    if not pace.verbose:
        about = [name for prefix in _prefixes(about, pace.sets) for name in _first(about, prefix, pace.names)]
    return [(name, number(plain[name])) for name in about]


def _prefixes(names: Sequence[str], sets: Sequence[str]) -> list[str]:
    """Return what the metrics of each evaluated set begin with; the empty text where there is one set."""
    prefixes = [f"{each}_" for each in sets]
    return [each for each in prefixes if any(name.startswith(each) for name in names)] or [""]


def _first(names: Sequence[str], prefix: str, headline: Sequence[str]) -> list[str]:
    """Return the metrics of one set to show: all of the headline that there are, and others up to `MOST_SHOWN`."""
    own = [name for name in names if name.startswith(prefix)]
    first = [f"{prefix}{name}" for name in headline if f"{prefix}{name}" in own]
    others = [name for name in own if name not in first and not name[len(prefix) :].startswith(EXTREMES)]
    return first + others[: max(MOST_SHOWN - len(first), 0)]


def shown(path: Path) -> str:
    """Return a path relative to the current directory if it is inside."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


Ending = Literal["done", "stopped", "failed"]


class PlainView:
    """Print one line per event on stderr, without control characters: for log files.

    The console calls these methods in order, after updating `pace`; other views override some of them.
    """

    def __init__(self, stage: str, pace: Pace) -> None:
        self.stage, self.pace = stage, pace

    def start(self, about: str) -> None:
        self.write(f"start  {about}")

    def step(self, metrics: Mapping[str, float]) -> None:
        self.write("  ".join(self.words(metrics)))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write("  ".join([f"eval {step}", *map(" ".join, details(metrics, self.pace))]))

    def saved(self, name: str, kind: str, path: str) -> None:
        self.write(f"saved {name} ({kind}) in {path}")

    def end(self, how: Ending) -> None:
        self.write(("done  " if how == "done" else "") + self.pace.ended(how))

    def words(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the update, the time left, the headline's metrics and the speed; else what an action alone reports."""
        headline = [f"{name} {number(metrics[name])}" for name in self.pace.names if name in metrics]
        headline = headline or [" ".join(each) for each in details(metrics, self.pace)]
        return [word for word in (self.pace.count(), *headline, speed(metrics), self.pace.left()) if word]

    def write(self, line: str) -> None:
        print(escape_control(f"[{self.stage}] {line}"), file=sys.stderr, flush=True)


class TqdmView(PlainView):
    """Print plain lines above a tqdm bar."""

    bar: Any = None

    def step(self, metrics: Mapping[str, float]) -> None:
        if self.bar is None:
            self.bar = tqdm(
                desc=escape_control(self.stage),
                initial=self.pace.step,
                total=self.pace.total,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
                dynamic_ncols=True,
            )
        self.bar.n = self.pace.step
        words = [word for word in self.words(metrics) if word not in (self.pace.count(), self.pace.left())]
        self.bar.set_postfix_str(escape_control("  ".join(words)))

    def end(self, how: Ending) -> None:
        if self.bar is not None:
            self.bar.close()
        super().end(how)

    def write(self, line: str) -> None:
        tqdm.write(escape_control(f"[{self.stage}] {line}"), file=sys.stderr)


class JsonView(PlainView):
    """Print one JSON object per event on stdout, with the metric names of metrics.jsonl: for programs."""

    def start(self, about: str) -> None:
        self.send("start", about=about)

    def step(self, metrics: Mapping[str, float]) -> None:
        left = self.pace.seconds_left()
        self.send("step", step=self.pace.step, updates=self.pace.total, seconds_left=left, **strict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.send("evaluation", step=step, **strict(metrics))

    def saved(self, name: str, kind: str, path: str) -> None:
        self.send("saved", name=name, kind=kind, path=path)

    def end(self, how: Ending) -> None:
        self.send("end", how=how, step=self.pace.step, seconds=self.pace.seconds())

    def send(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, "stage": self.stage, **values}, allow_nan=False), flush=True)


class RichView(PlainView):
    """Print a header, a live bar below other output, a line per evaluation, and a footer, on stderr."""

    def __init__(self, stage: str, pace: Pace) -> None:
        super().__init__(stage, pace)
        self.metrics: Mapping[str, float] = {}
        self.console = SafeConsole(stderr=True, highlight=False)
        text = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        self.bar = Progress(
            TimeElapsedColumn(),
            BarColumn(bar_width=20),
            text,
            console=self.console,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # never take output from a redirected stdout
        )
        self.task = self.bar.add_task("preparing", total=None)

    def start(self, about: str) -> None:
        self.console.print()
        self.console.rule(Text(self.stage, "bold"), align="left", style="cyan")
        self.console.print(Text(f"  {about}", "dim", overflow="fold"))
        self.bar.start()

    def step(self, metrics: Mapping[str, float]) -> None:
        self.metrics = {**self.metrics, **metrics}
        self.bar.update(
            self.task,
            total=self.pace.total,
            completed=self.pace.step,
            description="  ".join(self.words(self.metrics)),
        )

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.table(Text(f"eval {step}", "cyan"), details(metrics, self.pace))

    def saved(self, name: str, kind: str, path: str) -> None:
        self.console.print(Text.assemble("  saved ", (name, "bold"), f" ({kind}) in ", path, overflow="fold"))

    def end(self, how: Ending) -> None:
        self.bar.stop()
        mark, style = {"done": ("✓", "green"), "stopped": ("■", "yellow"), "failed": ("✗", "red")}[how]
        if self.metrics:
            self.table(Text(f"train {self.pace.step}", "cyan"), details(self.metrics, self.pace))
        self.console.print(Text.assemble("  ", (f"{mark} {self.pace.ended(how)}", style)))

    def table(self, title: Text, pairs: Sequence[tuple[str, str]]) -> None:
        """Print `title  name number  name number …`, in columns where they do not fit in a line."""
        cells = [Text.assemble((name, "dim"), " ", value) for name, value in pairs]
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row("", title, Columns(cells, padding=(0, 2)))
        self.console.print(grid)


def choose(progress: str, stage: str, pace: Pace) -> PlainView:
    """Return the view called `progress`, or plain lines where the terminal cannot move a cursor.

    A notebook cannot, but shows tqdm's bar, which only returns to the start of its line.
    """
    if progress == "json":
        return JsonView(stage, pace)
    if type(sys.stderr).__module__.startswith("ipykernel"):
        return TqdmView(stage, pace)
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainView(stage, pace)
    return TqdmView(stage, pace) if progress == "tqdm" else RichView(stage, pace)


@dataclass(eq=False)
class Console:
    """Show one stage at a time.

    progress: "rich" or "tqdm": a bar on stderr, or plain lines, one per logged step, if stderr is not a terminal.
    "json": one object per event on stdout. "none": nothing.
    metrics: names to show next to the bar, and first of an evaluation; None: loss, reward and accuracy.
    verbose: show every metric of an evaluation, rather than four, and at the end what was compiled.
    """

    progress: Literal["rich", "tqdm", "json", "none"] = "rich"
    metrics: list[str] | None = None
    verbose: bool = False
    _view: PlainView | None = field(default=None, init=False, repr=False)

    @hookimpl(tryfirst=True)
    def rlhf_stage_start(self, stage: Stage, config: TrainerConfig) -> None:
        if stage.is_main and self.progress != "none":
            about = f"{shown(stage.dir)} · {_devices(stage)} · seed {stage.seed}"
            names = HEADLINE if self.metrics is None else self.metrics
            sets = list(named_sets(stage.inputs.get("eval_dataset", config.eval_data)))
            pace = Pace(stage.dir / "plan.json", names, sets=sets, verbose=self.verbose)
            self._view = choose(self.progress, stage.name, pace)
            self._view.start(about)

    @hookimpl(tryfirst=True)
    def rlhf_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._view is None:
            return
        training = {name: x for name, x in metrics.items() if not name.startswith("eval_")}
        evaluation = {name: x for name, x in metrics.items() if name.startswith("eval_")}
        if training:
            self._view.pace.mark(step)
            self._view.step(training)
        if evaluation:
            self._view.evaluation(step, evaluation)

    @hookimpl(tryfirst=True)
    def rlhf_artifact_saved(self, artifact: Artifact) -> None:
        if self._view is not None:
            self._view.saved(artifact.name, artifact.kind, shown(Path(artifact.path)))

    @hookimpl(tryfirst=True)
    def rlhf_stage_end(self, error: BaseException | None) -> None:
        if self._view is not None:
            if error is None:
                self._view.end("done")
            elif isinstance(error, (Stopped, KeyboardInterrupt)):
                self._view.end("stopped")
            else:
                self._view.end("failed")
            self._view = None


def _devices(stage: Stage) -> str:
    """Describe a stage's devices, as in `8 × TPU v5 lite` or `1 × cpu`."""
    kinds = (
        Counter(device.device_kind for device in stage.mesh.devices.flat) if stage.mesh is not None else {}
    )
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "no devices"
