"""The result of one check of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PASS: Literal["pass"] = "pass"
FAIL: Literal["FAIL"] = "FAIL"
NOT_APPLICABLE: Literal["not applicable"] = "not applicable"
Verdict = Literal["pass", "FAIL", "not applicable"]


@dataclass(frozen=True)
class Check:
    """One promise of a stage, and whether it holds.

    name: of the check, the same in every run. number: what was measured, with its unit, for a reader. why: of a failed
        check, what is wrong and what it may come from; of one that is not applicable, why it is not. where: the file,
        and the row or rollout in it, that shows it. values: what was measured, for programs; finite numbers.
    """

    name: str
    verdict: Verdict
    number: str = ""
    why: str = ""
    where: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


def verdict_of(problem: str) -> Verdict:
    """Return FAIL where there is a problem, and else PASS."""
    return FAIL if problem else PASS


def skipped(name: str, why: str, number: str = "") -> Check:
    """Return a check that is not applicable."""
    return Check(name, NOT_APPLICABLE, number, why)
