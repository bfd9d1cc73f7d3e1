"""Actions: the order of what is due after one update, when each is, and how one stops a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_core import fit, hookimpl
from rlhf_core.errors import RunError
from rlhf_core.fit import Action
from rlhf_core.fit.best import Best

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def with_actions(change_build: Callable[..., None]) -> Callable[..., None]:
    """Add actions to the build of the next runs."""

    def add(*actions: Action) -> None:
        change_build(lambda build: fit.replace(build, actions=[*build.actions, *actions]))

    return add


def places(table: str) -> list[str]:
    return re.findall(r"^\s*\| `?(\w+)`? \|", table, re.MULTILINE)[1:]


def test_the_order_is_that_of_both_tables() -> None:
    page = (REPOSITORY / "docs/how-to/write_a_trainer.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| place \|.*?\n\n", page, re.DOTALL)
    assert places(table) == places(fit.fit.__doc__ or "") == list(fit.ORDER)


class Told:
    """A logger that notes when it is told of a step, and which metrics."""

    def __init__(self, noted: list[tuple[str, int]]) -> None:
        self.noted, self.metrics = noted, dict[int, dict[str, float]]()

    @hookimpl
    def rlhf_step_end(self, step: int, metrics: dict[str, float]) -> None:
        self.noted.append(("report", step))
        self.metrics[step] = metrics


def test_what_is_due_after_one_update_happens_in_this_order(
    short: Any, with_actions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[str, int]] = []

    def note(place: str, metrics: dict[str, float] | None = None) -> Callable[[fit.Moment], Any]:
        def run(at: fit.Moment) -> Any:
            noted.append((place, at.step))
            return metrics

        return run

    save, compare, read = fit.Progress.save, Best.compare, fit.MetricWindow.read

    def saved(
        self: fit.Progress, step: int, state: Any, *, reported: bool = True, wait: bool = False
    ) -> None:
        noted.append(("save" if reported else "keep", step))
        save(self, step, state, reported=reported, wait=wait)

    def compared(self: Any, step: int, metrics: Any) -> bool:
        noted.append(("compare", step))
        return bool(compare(self, step, metrics))

    def logged(self: Any, total: int) -> Any:
        noted.append(("log", -1))
        return read(self, total)

    monkeypatch.setattr(fit.Progress, "save", saved)
    monkeypatch.setattr(Best, "compare", compared)
    monkeypatch.setattr(fit.MetricWindow, "read", logged)
    told = Told(noted)
    with_actions(
        Action(2, note("show"), "show"),
        Action(2, note("watch"), "watch"),
        Action(2, note("measure", {"own": 1.5})),
        Action(2, note("move"), "move"),
    )
    rows = short.rows["sft"]
    options = {"evaluation_steps": 2, "early_stopping_patience": 9, "save_steps": 2, "max_training_steps": 4}
    short.train("sft", listeners=(told,), inputs={"eval_dataset": rows[:3]}, log_steps=2, **options)
    named = [place for place, _ in noted]
    second = named[: named.index("save") + 1]
    assert second == ["move", "log", "measure", "report", "compare", "watch", "show", "save"]
    assert named[len(second) :] == ["move", "keep", "log", "measure", "report", "compare", "watch", "show"]
    assert {step for _, step in noted} == {-1, 2, 4}
    assert all({"loss", "eval_loss", "own"} <= metrics.keys() for metrics in told.metrics.values())


def test_when_actions_are_due(short: Any, with_actions: Callable[..., None]) -> None:
    called: dict[str, list[int]] = {"third": [], "ends": [], "both": [], "told": []}

    def note(name: str) -> Callable[[fit.Moment], None]:
        return lambda at: called[name].append(at.step)

    with_actions(
        Action(3, note("third")),
        Action(lambda at: at.ends, note("ends")),
        Action(lambda at: at.starts or at.ends, note("both"), "show"),
        Action(lambda at: bool(at.metrics), note("told"), "watch"),
    )
    short.train("sft", log_steps=4)
    assert called == {"third": [3, 6], "ends": [6], "both": [0, 6], "told": [4, 6]}


def test_an_action_sees_the_state_of_its_update_and_may_stop_the_run(
    short: Any, with_actions: Callable[..., None]
) -> None:
    steps: list[tuple[int, int]] = []

    def watch(at: fit.Moment) -> None:
        steps.append((at.step, int(at.state.step)))
        at.stop(None if at.step < 4 else "enough")

    with_actions(Action(2, watch, "watch"))
    with pytest.raises(
        RunError, match=r"stage 'sft': stopped after update 4 of 6: enough\. The state is kept in"
    ):
        short.train("sft")
    assert steps == [(2, 2), (4, 4)]
    with_actions()
    found, watched = short.train("sft")
    assert watched.steps() == [5, 6]
    plain, _ = short.train("sft", at="plain")
    for path, leaf in plain.items():
        np.testing.assert_array_equal(leaf, found[path], err_msg=path)
