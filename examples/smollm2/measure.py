"""Measure a model on held-out tasks: sample a completion of each, judge it, and compare before with after.

Everything is plain numbers in a dict, so that it can be kept as JSON. An estimate {"value", "low", "high"} is a number
and its 95 % interval: Wilson's of a share (Wilson 1927), and a bootstrap over prompts of a difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from judge import judge

from rlhf_core import SamplerInputs
from rlhf_core.sampling import Sampler, SamplingOptions

if TYPE_CHECKING:
    from rlhf_core.models import Model

Estimate = dict[str, float]
Z = 1.959964
"""The normal distribution's 97.5 % quantile."""
RESAMPLES = 10_000
PROMPTS_PER_CALL = 64
LONGEST_PROMPT = 512
"""Tokens; a longer prompt is an error."""


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read a jsonl file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def complete(
    model: Model,
    prompts: Sequence[Any],
    seed: int,
    *,
    temperature: float,
    max_completion_length: int,
    num_generations: int = 1,
) -> list[tuple[str, bool]]:
    """Sample completions of conversations: (text, whether it ended by itself), those of a prompt together."""
    assert model.tokenizer is not None
    ids = [
        model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for messages in prompts
    ]
    sampler = Sampler(
        SamplerInputs(
            definition=model.definition,
            options=SamplingOptions(temperature=temperature, max_completion_length=max_completion_length),
            mesh=model.mesh,
            stop_ids=model.stop_ids,
            num_generations=num_generations,
            prompts_per_call=min(PROMPTS_PER_CALL, len(ids)),
            max_prompt_length=min(max(map(len, ids)), LONGEST_PROMPT),
            tokenizer=model.tokenizer,
        )
    )
    drawn = sampler(model.params, ids, jax.random.key(seed))
    texts = model.tokenizer.batch_decode(
        [row[:n].tolist() for row, n in zip(drawn.tokens, drawn.lengths, strict=True)],
        skip_special_tokens=True,
    )
    return list(zip(texts, map(bool, drawn.finished), strict=True))


def read_episodes(
    samples: Path, rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, list[tuple[str, bool]]]]:
    """Read the first and the last evaluation that a stage has written: (rows, their last messages before and after).

    Rows that the stage has not sampled are left out.
    """
    row_of = {row["prompt"][-1]["content"]: row for row in rows}
    files = sorted(samples.glob("evaluation-*.jsonl"))
    sides = {side: read_rows(file) for side, file in (("before", files[0]), ("after", files[-1]))}
    asked = [[episode["prompt"][-1]["content"] for episode in episodes] for episodes in sides.values()]
    if asked[0] != asked[1]:
        raise ValueError(f"{files[0]} and {files[-1]} are about different prompts")
    completions = {
        side: [(episode["completion"][-1]["content"], episode["finished"]) for episode in episodes]
        for side, episodes in sides.items()
    }
    return [row_of[prompt] for prompt in asked[0]], completions


def proportion(successes: int, trials: int) -> Estimate:
    """Estimate a share with Wilson's interval, which holds near 0 and 1 too."""
    share, z = successes / trials, Z**2 / trials
    centre = (share + z / 2) / (1 + z)
    half = Z * math.sqrt(share * (1 - share) / trials + z / (4 * trials)) / (1 + z)
    return {"value": share, "low": max(min(centre - half, share), 0.0), "high": max(centre + half, share)}


def paired_gain(before: Sequence[bool], after: Sequence[bool], seed: int = 0) -> Estimate:
    """Estimate the mean of after − before over the same prompts, with the percentiles of a bootstrap over prompts."""
    difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(difference), (RESAMPLES, len(difference)))
    low, high = np.percentile(difference[drawn].mean(axis=1), (2.5, 97.5))
    return {"value": float(difference.mean()), "low": float(low), "high": float(high)}


def judge_all(
    rows: Sequence[Mapping[str, Any]], completions: Sequence[tuple[str, bool]]
) -> list[dict[str, bool]]:
    """Judge one completion per row."""
    return [
        judge(row, text, finished=finished) for row, (text, finished) in zip(rows, completions, strict=True)
    ]


def describe(rows: Sequence[Mapping[str, Any]], completions: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    """Measure the completions of one model: its successes, and how often each part of the task holds."""
    verdicts = judge_all(rows, completions)
    right = [all(verdict.values()) for verdict in verdicts]
    return {
        "success": proportion(sum(right), len(right)),
        "parts": {part: sum(verdict[part] for verdict in verdicts) / len(rows) for part in verdicts[0]},
        "words": sum(len(text.split()) for text, _ in completions) / len(rows),
        "different": len({text for text, _ in completions}) / len(rows),
        "right": right,
        "texts": [text for text, _ in completions],
    }
