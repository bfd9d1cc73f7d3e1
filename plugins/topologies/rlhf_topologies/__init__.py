"""Compile a pipeline's programs for other hardware, and estimate what they need and how fast they can be."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core import hookimpl


@hookimpl
def rlhf_check_on(on: str) -> tuple[int, Callable[..., None]]:
    from rlhf_topologies.check import check_on
    from rlhf_topologies.chips import parse

    return parse(on).count, check_on
