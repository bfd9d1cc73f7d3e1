"""How tokens are sampled, and what both samplers check before they sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from rlhf_core.config import Options
from rlhf_core.contracts import SamplerInputs
from rlhf_core.errors import InputError
from rlhf_core.sampling.stop_strings import stop_table


class SamplingMesh(Options):
    """The sampler's own arrangement of the devices; the rest of them sample other prompts with the same weights."""

    tensor: int | None = Field(
        default=None,
        ge=1,
        description="devices that share each layer, of one machine or TPU slice; none: as few as have the memory",
    )


class SamplingOptions(Options):
    """How tokens are sampled (repetition_penalty, temperature, top_k, top_p, min_p, in transformers' order), and what
    ends a completion besides the model's own stop tokens.
    """

    temperature: float = Field(
        default=1.0, ge=0, description="logits are divided by it; 0 takes the likeliest token"
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="share of the probability to sample from; 1: all"
    )
    top_k: int | None = Field(default=None, ge=1, description="number of likeliest tokens to sample from")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="least probability, relative to the likeliest token's"
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="logits of the prompt's and the completion's tokens are divided by it where positive, "
        "multiplied where negative; 1: off",
    )
    max_completion_length: int = Field(default=256, ge=1, description="tokens, the stop token included")
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end a completion, with the token that completes one"
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="tokens that end a completion, besides the model's own"
    )
    mesh: SamplingMesh = Field(
        default=SamplingMesh(), description="how devices share the model while they sample"
    )


def stops_of(inputs: SamplerInputs) -> tuple[tuple[int, ...], np.ndarray | None]:
    """Return (all stop tokens, the table of the stop strings, None where there are none).

    Raises InputError for stop strings without a tokenizer or that it cannot write, and for stop tokens that the model
    does not have.
    """
    options, vocab_size = inputs.options, inputs.definition.vocab_size
    if unknown := [i for i in options.stop_token_ids if i >= vocab_size]:
        raise InputError(
            f"sampling.stop_token_ids: the model has no token {', '.join(map(str, unknown))}; its ids end at "
            f"{vocab_size - 1}"
        )
    ids = tuple(int(i) for i in (*inputs.stop_ids, *options.stop_token_ids))
    if not options.stop_strings:
        return ids, None
    if inputs.tokenizer is None:
        raise InputError(
            "sampling.stop_strings: there is no tokenizer to turn tokens into text; give one, or use "
            "sampling.stop_token_ids"
        )
    return ids, stop_table(options.stop_strings, inputs.tokenizer, vocab_size)


def check_prompts(lengths: Sequence[int] | np.ndarray, longest: int) -> None:
    """Raise InputError for prompts of no tokens, or of more than `longest`."""
    lengths = np.asarray(lengths, np.int32)
    problems = [f"prompt {i + 1} has no tokens" for i in np.flatnonzero(lengths == 0)]
    problems += [
        f"prompt {i + 1} has {lengths[i]} tokens, more than max_prompt_length={longest}; "
        "shorten it or raise max_prompt_length"
        for i in np.flatnonzero(lengths > longest)
    ]
    if problems:
        raise InputError(*problems)
