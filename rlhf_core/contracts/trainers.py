"""What a trainer gives the pipeline: its options, its work, and what that would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WSD_DECAY = 0.1
"""Share of the updates after the warmup, the last ones, over which the schedule "wsd" decays."""


@dataclass(frozen=True)
class Forecast:
    """What a stage would do, as `rlhf check` prints it.

    lines: examples, updates, tokens, memory, each a line.
    warnings: without "warning: "; a pipeline shows them at its start, and not again where the stage raises them.
    memory: bytes that the stage takes at most, in all or per device; None: not known.
    told: warnings whose content `lines` have; the stage does not show them again either.
    """

    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: int | None = None
    told: tuple[str, ...] = ()

    def printed(self) -> list[str]:
        """Return every line for a reader, warnings last."""
        return [*self.lines, *(f"warning: {line}" for line in self.warnings)]


@dataclass(frozen=True)
class Trainer:
    """A trainer as the pipeline sees it.

    config: the class of its options, a subclass of `rlhf_core.TrainerConfig`.
    outputs: {output name: artifact kind}, all of which `run` must save.
    run: does the work, given the config and the `rlhf_core.Stage`, which hold its inputs.
    build: optional: what `run` trains, from the config and a `rlhf_core.training.Context`; `rlhf check` counts it. See
        `rlhf_core.training.define_trainer`, which makes a trainer of a `build` alone.
    """

    config: type[Any]
    outputs: Mapping[str, str]
    run: Callable[[Any, Any], None]
    build: Callable[[Any, Any], Any] | None = None
