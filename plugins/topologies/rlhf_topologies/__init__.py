"""Compile a pipeline's programs for other hardware, and estimate what they need and how fast they can be."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core import hookimpl


@hookimpl
def rlhf_check_on(on: str, suggest: bool) -> tuple[int, Callable[..., None]]:
    from rlhf_topologies.check import check_on, suggest_on
    from rlhf_topologies.names import machines, parse

    return (machines(on)[0].count, suggest_on) if suggest else (parse(on).count, check_on)
