"""Ctrl-C ends an experiment, and keeps what it has found."""

from __future__ import annotations

import select
import time
from typing import Any

import pytest

from tests.torture.experiment import Case, Failure, Trial


def test_an_interrupted_experiment_begins_no_further_case(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = select.select
    interrupts = [KeyboardInterrupt]

    def interrupted(*arguments: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return waited(*arguments)

    monkeypatch.setattr(select, "select", interrupted)
    trial = Trial("saves", 0, time.monotonic() + 60)

    def judge(case: Case) -> None:
        case.fail("found")

    trial.each(["first", "second", "third"], judge, at_once=1)
    assert (trial.failures, trial.cases, trial.unfinished) == ([Failure("first", "found")], 1, 2)
