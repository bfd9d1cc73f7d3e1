"""Check every promise of a run of rlhf-core, from what it wrote.

    from rlhf_audit import audit

    for check in audit("runs/first")["policy"]:
        print(check.name, check.verdict, check.number)

What reads runs is imported when it is needed: `rlhf --help` imports this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_audit.check import Check

if TYPE_CHECKING:
    from rlhf_audit.power import power_table as power_table
    from rlhf_audit.power import tokens_needed as tokens_needed

__all__ = ["Check", "audit", "power_table", "tokens_needed"]


def __getattr__(name: str) -> Any:
    """Import what computes the power of the sampling test when it is used."""
    if name not in __all__:
        raise AttributeError(f"module 'rlhf_audit' has no attribute '{name}'")
    return getattr(import_module("rlhf_audit.power"), name)


def audit(
    run: str | Path,
    *,
    stage: str | None = None,
    replay: int = 0,
    exact: bool = False,
    call: bool = False,
    plugins: Sequence[Path] = (),
) -> dict[str, list[Check]]:
    """Check the stages of a run; return {stage: its checks}.

    stage: the only one to check. replay: how many updates to train again. exact: read sampled tokens again
    with the policies that are kept. call: call rewards again that cost something, too. plugins: files
    with components and hooks.
    Raises InputError where `run` is no run directory, or has no such stage.
    """
    from rlhf_audit import auditing

    options = auditing.AuditOptions(replay, exact, call, plugins)
    return auditing.audit(run, stage=stage, options=options)
