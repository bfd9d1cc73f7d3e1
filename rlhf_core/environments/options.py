"""The environment of a stage, by name, and the limits of its episodes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config import Component

ANSWER_TOKENS = 64
"""What an episode has room for at least after each turn, unless `max_tokens` says otherwise."""


class EnvironmentOptions(Component):
    """Name an environment in a config: `environment: Annotated[EnvironmentOptions, ENVIRONMENT] | None`."""

    name: str = Field(
        default="tools", description="the environment; `tools`: functions that the policy may call"
    )
    max_turns: int = Field(default=8, ge=1, description="completions per episode")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens per episode after its first prompt, the environment's included; none: max_turns × "
        "(sampling.max_completion_length + the same again, 64 or more, for an answer)",
    )
    max_seconds: float | None = Field(
        default=None,
        gt=0,
        description="wall time per episode, after which it ends with its turn; none: no limit",
    )
    timeout: float | None = Field(
        default=None, gt=0, description="seconds per call of `reset` or `step`; none: no limit"
    )
    processes: int | None = Field(
        default=None, ge=1, description="worker processes that the calls share; none: no worker"
    )
    on_error: Literal["skip", "stop"] = Field(
        default="skip",
        description="when an episode fails or takes too long: leave it out and report it, or end the run",
    )
    weight: float = Field(default=1.0, description="weight of the episode's reward in the sum of rewards")
    history: Literal["kept", "encoded_again"] = Field(
        default="kept",
        description="what a turn continues: the tokens so far, or the conversation as the chat template writes it "
        "again, for templates that rewrite earlier turns; every turn is then a training row of its own",
    )
    check: bool = Field(
        default=True, description="whether `rlhf check` begins an episode and takes one made-up turn"
    )

    def length(self, max_completion_length: int) -> int:
        """Return the most tokens of an episode after its first prompt."""
        answers = max(max_completion_length, ANSWER_TOKENS)
        return self.max_tokens or self.max_turns * (max_completion_length + answers)
