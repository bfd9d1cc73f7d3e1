"""What a stage will test of its sampler, and why it may not: the part of the sampling test that a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlhf_core.sampling import SamplingOptions

BYTES = {"token": 12, "rollout": 2000}
"""Of values on disk, at most."""
PASSES = {
    "update": "the training pass",
    "rollout": "the pass before a rollout's first update",
    "test": "a pass without gradient before a rollout's first update",
}
"""What reads sampled tokens, by `SamplingTestOptions.read_by`."""


@dataclass(frozen=True)
class SamplingTestOptions:
    """How a trainer has its sampler tested.

    tolerance: nats per token by which the mean surprisal may be off; 0: the run is never stopped.
    read_by: which pass computes the moments: "update", the one that trains, where a rollout has a single update;
        "rollout", the trainer's own before the first update; or "test", one of the test's own.
    also: what is read in a further pass, and why; "": nothing.
    """

    tolerance: float
    read_by: Literal["update", "rollout", "test"] = "test"
    also: str = ""


EVERY = 8
"""In a pass of the test's own, which filters need as well, one of so many prompts is read."""


def filters_of(sampling: SamplingOptions) -> list[str]:
    """Name the options that leave out tokens."""
    acting = {
        "top_k": sampling.top_k is not None,
        "top_p": sampling.top_p < 1,
        "min_p": bool(sampling.min_p),
    }
    return [f"sampling.{name}" for name, acts in acting.items() if acts]


def not_applicable(sampling: SamplingOptions) -> str | None:
    """Return why completions cannot be held to the trainer's distribution; None: they can."""
    if sampling.temperature == 0:
        return "with sampling.temperature = 0 nothing is drawn"
    if sampling.repetition_penalty == 1:
        return None
    return "with sampling.repetition_penalty tokens are drawn from another distribution than the trainer's"


def plan(options: SamplingTestOptions, sampling: SamplingOptions, *, ahead: int, draws: int = 0) -> str:
    """Say what a stage will test, and what that costs. draws: tokens of each engine at each publication."""
    reason = not_applicable(sampling)
    if reason is not None:
        return f"sampling test: not applicable: {reason}"
    pass_ = PASSES[options.read_by]
    filters = " and ".join(filters_of(sampling))
    if filters:
        line = f"sampling test: one of {EVERY} prompts, in a further pass without gradient, with {filters}"
    elif options.read_by == "test":
        line = f"sampling test: one of {EVERY} prompts, in {pass_}"
    else:
        line = f"sampling test: every sampled token, in {pass_}"
    if options.also:
        line += f"; in a further pass without gradient {options.also}"
    if ahead:
        line += "; logged alone, since rollouts_ahead trains another policy than it samples with"
        if not draws:
            return line
        line += f"; and {draws} tokens that each engine draws from each policy before it samples with it"
    if not options.tolerance:
        return f"{line}; logged alone (limits.surprisal_gap = 0)"
    return f"{line}; stops the run where the surprisal is more than {options.tolerance:g} nats per token off"


def most_bytes(*, rollouts: int, tokens: int) -> int:
    """Forecast the size of the values that are written."""
    return rollouts * BYTES["rollout"] + tokens * BYTES["token"]
