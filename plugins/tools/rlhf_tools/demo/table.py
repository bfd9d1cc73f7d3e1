"""Print the closing table of the quickstart, at most 80 columns wide and complete without colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhf_tools.demo.generate import KINDS

_MISTAKES = {
    "well_formed": "malformed or unfinished",
    "finished": "too long",
    "name": "wrong name",
    "colour": "wrong colour",
    "item": "wrong item",
    "close": "rude close",
}


def percent(estimate: Mapping[str, float]) -> str:
    """`48.2 % [43.9, 52.6]`."""
    value, low, high = (100 * estimate[key] for key in ("value", "low", "high"))
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def number(estimate: Mapping[str, float]) -> str:
    """`1.24 [1.10, 1.38]`."""
    return f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def closing_table(summary: Mapping[str, Any], directory: Path) -> RenderableType:
    """Lay out what `measure` found for a terminal."""
    parts: list[RenderableType] = []
    if summary["found"]:
        parts.append(Text(f"\nFound the finished run in {directory}; nothing was trained.", "bold"))
    control = ", preference labels shuffled: a control" if summary["shuffle_labels"] else ""
    parts += [
        Text(f"\nQuickstart, seed {summary['seed']}{control}\n", "bold"),
        Text("Held-out pairs in which the reward model prefers the good reply, by mistake:"),
        _reward_model(summary["pair_accuracy"]),
        Text(f"Replies to {summary['prompts']} held-out orders at temperature 1 [95 % interval]:"),
        _policy(summary),
        Text("The first three:\n"),
        _examples(summary["examples"]),
        _times(summary["seconds"]),
        Text(f"As a page: rlhf report {directory}"),
    ]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _policy(summary: Mapping[str, Any]) -> Table:
    before, after = summary["before"], summary["after"]
    table = _table("", "before (SFT)", "after (GRPO)")
    table.add_row("right", percent(before["success"]), percent(after["success"]), style="bold")
    table.add_row("right, best of 8 by reward", percent(before["best_of_8"]), percent(after["best_of_8"]))
    table.add_row("mean reward", number(before["reward"]), number(after["reward"]))
    table.add_row("mean reward of right replies", "", number(summary["good_reply_reward"]))
    table.add_row("mean length, tokens", number(before["length"]), number(after["length"]))
    table.add_row("KL to SFT, nats a reply", "0", number(summary["kl"]))
    for part, words in _MISTAKES.items():
        shares = (f"{100 * side['mistakes'][part]:.1f} %" for side in (before, after))
        table.add_row(words, *shares, style="dim")
    return table


def _reward_model(accuracy: Mapping[str, Mapping[str, float]]) -> Table:
    table = _table("any", *KINDS)
    table.add_row(*(f"{100 * accuracy[kind]['value']:.1f} %" for kind in ("all", *KINDS)))
    return table


def _examples(examples: list[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for example in examples:
        table.add_row("order", Text(example["prompt"], "bold"), "")
        for side in ("before", "after"):
            said = example[side]
            verdict = Text("wrong", "red") if said["mistakes"] else Text("right", "green")
            table.add_row(side, Text(said["reply"]), verdict)
    return table


def _times(seconds: Mapping[str, float]) -> Text:
    each = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    return Text(f"\nWall time: {each}; {sum(seconds.values()):.0f} s in all.")
