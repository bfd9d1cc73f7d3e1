"""Four ways of showing the same events."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from rlhf_core.loggers.jsonl import strict
from rlhf_core.loggers.pace import Pace, clock, details, speed
from rlhf_core.terminal import SafeConsole, visible

Pairs = Sequence[tuple[str, str]]
Ending = Literal["done", "stopped", "failed"]


class View(Protocol):
    """What the console tells a view, in the order in which it happens. `pace` is up to date at each call."""

    pace: Pace

    def start(self, about: str) -> None: ...
    def step(self, metrics: Mapping[str, float]) -> None: ...
    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def saved(self, name: str, kind: str, path: str) -> None: ...
    def end(self, how: Ending) -> None: ...


def choose(progress: str, stage: str, pace: Pace) -> View:
    """The view called `progress`; plain lines take the place of a bar where no cursor can be moved."""
    if progress == "json":
        return JsonView(stage, pace)
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainView(stage, pace)
    return TqdmView(stage, pace) if progress == "tqdm" else RichView(stage, pace)


class PlainView:
    """A line an event, on stderr, without control characters: for log files."""

    def __init__(self, stage: str, pace: Pace) -> None:
        self.stage, self.pace = stage, pace

    def start(self, about: str) -> None:
        self.write(f"start  {about}")

    def step(self, metrics: Mapping[str, float]) -> None:
        words = [
            self.pace.count(),
            *map(" ".join, self.pace.headline(metrics)),
            speed(metrics),
            self.pace.left(),
        ]
        self.write("  ".join(word for word in words if word))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write("  ".join([f"eval {step}", *map(" ".join, details(metrics))]))

    def saved(self, name: str, kind: str, path: str) -> None:
        self.write(f"saved {name} ({kind}) in {path}")

    def end(self, how: Ending) -> None:
        self.write(f"{how}  {self.pace.step} updates in {clock(self.pace.seconds())}")

    def write(self, line: str) -> None:
        print(visible(f"[{self.stage}] {line}"), file=sys.stderr, flush=True)


class TqdmView(PlainView):
    """Plain lines above a tqdm bar."""

    def __init__(self, stage: str, pace: Pace) -> None:
        super().__init__(stage, pace)
        self.bar: Any = None

    def step(self, metrics: Mapping[str, float]) -> None:
        if self.bar is None:
            self.bar = tqdm(
                desc=visible(self.stage),
                initial=self.pace.step,
                total=self.pace.total,
                bar_format="{desc} {n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}",
                dynamic_ncols=True,
            )
        self.bar.n = self.pace.step
        words = [*map(" ".join, self.pace.headline(metrics)), speed(metrics)]
        self.bar.set_postfix_str(visible("  ".join(words)))

    def end(self, how: Ending) -> None:
        if self.bar is not None:
            self.bar.close()
        super().end(how)

    def write(self, line: str) -> None:
        tqdm.write(visible(f"[{self.stage}] {line}"), file=sys.stderr)


class JsonView:
    """An object an event on stdout, metrics under their names in metrics.jsonl: for programs."""

    def __init__(self, stage: str, pace: Pace) -> None:
        self.stage, self.pace = stage, pace

    def start(self, about: str) -> None:
        self.write("start", about=about)

    def step(self, metrics: Mapping[str, float]) -> None:
        left = self.pace.seconds_left()
        self.write("step", step=self.pace.step, updates=self.pace.total, seconds_left=left, **strict(metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write("evaluation", step=step, **strict(metrics))

    def saved(self, name: str, kind: str, path: str) -> None:
        self.write("saved", name=name, kind=kind, path=path)

    def end(self, how: Ending) -> None:
        self.write("end", how=how, step=self.pace.step, seconds=self.pace.seconds())

    def write(self, event: str, **values: Any) -> None:
        print(json.dumps({"event": event, "stage": self.stage, **values}, allow_nan=False), flush=True)


class RichView:
    """A header, a live bar below what is printed meanwhile, a line an evaluation, and a footer, on stderr."""

    def __init__(self, stage: str, pace: Pace) -> None:
        self.stage, self.pace = stage, pace
        self.metrics: Mapping[str, float] = {}
        self.console = SafeConsole(stderr=True, highlight=False)
        self.live = Live(
            self,
            console=self.console,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # a redirected stdout keeps what is printed to it
        )

    def start(self, about: str) -> None:
        self.console.print()
        self.console.rule(Text(self.stage, "bold"), align="left", style="cyan")
        self.console.print(Text(f"  {about}", "dim", overflow="fold"))
        self.live.start(refresh=True)

    def step(self, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.pairs(Text(f"eval {step}", "cyan"), details(metrics))

    def saved(self, name: str, kind: str, path: str) -> None:
        self.console.print(Text.assemble("  saved ", (name, "bold"), f" ({kind}) in ", path, overflow="fold"))

    def end(self, how: Ending) -> None:
        self.live.stop()
        mark, style = {"done": ("✓", "green"), "stopped": ("■", "yellow"), "failed": ("✗", "red")}[how]
        if self.metrics:
            self.pairs(Text(f"train {self.pace.step}", "cyan"), details(self.metrics))
        updates = (
            f"{self.pace.step} updates" if how == "done" else f"{how} at update {self.pace.count().strip()}"
        )
        self.console.print(
            Text.assemble("  ", (f"{mark} {updates}", style), f" in {clock(self.pace.seconds())}")
        )

    def pairs(self, title: Text, pairs: Pairs) -> None:
        """`title  name number  name number …`, wrapped between pairs and indented under the first of them."""
        indent = max(len(title), 9) + 4
        lines = [Text.assemble("  ", title, " " * (indent - 2 - len(title)))]
        for name, value in pairs:
            pair = Text.assemble((name, "dim"), " ", value, "  ")
            if len(lines[-1]) + len(pair) - 2 > self.console.width and len(lines[-1]) > indent:
                lines.append(Text(" " * indent))
            lines[-1].append_text(pair)
        for line in lines:
            line.rstrip()
            self.console.print(line, overflow="fold")

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The bar as it is now; drawn twice a second by rich."""
        pace = self.pace
        if pace.step == 0:
            words = ["preparing", clock(pace.seconds())]
        else:
            shown = [f"{name} {value}" for name, value in pace.headline(self.metrics)]
            words = [pace.count(), pace.left(), *shown, speed(self.metrics)]
        words = [word for word in words if word]
        while len(words) > 2 and sum(map(len, words)) + 2 * len(words) + 12 > options.max_width:
            words.pop()
        row = Table.grid(padding=(0, 0, 0, 2), expand=True)
        row.add_column(width=0)
        row.add_column(ratio=1)
        for _word in words:
            row.add_column(no_wrap=True)
        row.add_row(
            "", ProgressBar(pace.total, pace.step, pulse=pace.step == 0 or pace.total is None), *words
        )
        yield row
