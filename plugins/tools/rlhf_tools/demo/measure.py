"""Measure a finished quickstart on held-out data: the reward model, and the policy before and after GRPO.

Everything is plain numbers in a dict, so that it can be kept as JSON. An estimate {"value", "low", "high"} is
a number and its 95 % interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import SamplerInputs, data, installed_registry, load_model
from rlhf_core.sampling import Sampler, SamplingOptions
from rlhf_core.scoring import Scorer
from rlhf_core.tokenizer import Encoder
from rlhf_tools.demo.generate import KINDS
from rlhf_tools.demo.judge import Verdict, judge, parse_order

if TYPE_CHECKING:
    from rlhf_core.models import Model

Estimate = dict[str, float]
Z = 1.959964
"""The normal distribution's 97.5 % quantile."""
SAMPLES = 8
"""Completions per prompt; the first one counts, all of them serve "best of 8"."""
LONGEST_REPLY = 24
"""Tokens."""
SHOWN = 3
"""Prompts whose completions are kept as text."""


def proportion(successes: int, trials: int) -> Estimate:
    """A share with Wilson's interval (Wilson 1927), which holds near 0 and 1 too."""
    share = successes / trials
    z = Z**2 / trials
    centre = (share + z / 2) / (1 + z)
    half = Z * math.sqrt(share * (1 - share) / trials + z / (4 * trials)) / (1 + z)
    # At 0 and 1 one end of the interval is the share itself, up to rounding.
    return {"value": share, "low": max(min(centre - half, share), 0.0), "high": max(centre + half, share)}


def mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """Compute a mean with its normal interval, from the n − 1 standard deviation."""
    x = np.asarray(values, np.float64)
    half = Z * float(x.std(ddof=1)) / math.sqrt(len(x))
    value = float(x.mean())
    return {"value": value, "low": value - half, "high": value + half}


class Replies(NamedTuple):
    """SAMPLES replies to each of P prompts; arrays lead with [P, SAMPLES]."""

    texts: list[list[str]]
    verdicts: list[list[Verdict]]
    rewards: np.ndarray
    """float32, reward units."""
    tokens: np.ndarray
    """int32 [P, SAMPLES, LONGEST_REPLY], 0 after the end."""
    lengths: np.ndarray
    """int32, tokens, the stop token included."""


def draw(model: Model, scorer: Scorer, prompts: Sequence[str], seed: int) -> Replies:
    """Sample at temperature 1, judge and score."""
    ids = Encoder(model.tokenizer).prompts(prompts)
    sampler = Sampler(
        SamplerInputs(
            definition=model.definition,
            options=SamplingOptions(temperature=1.0, max_completion_length=LONGEST_REPLY),
            mesh=model.mesh,
            stop_ids=model.stop_ids,
            num_generations=SAMPLES,
            prompts_per_call=64,
            max_prompt_length=max(map(len, ids)),
        )
    )
    drawn = sampler(model.params, ids, jax.random.key(seed))
    assert model.tokenizer is not None
    flat = model.tokenizer.batch_decode(
        [row[:n].tolist() for row, n in zip(drawn.tokens, drawn.lengths, strict=True)],
        skip_special_tokens=True,
    )
    asked = [prompt for prompt in prompts for _ in range(SAMPLES)]
    rewards = scorer.score_completions(asked, flat)
    verdicts = [judge(p, t, finished=bool(f)) for p, t, f in zip(asked, flat, drawn.finished, strict=True)]
    grouped = range(0, len(flat), SAMPLES)
    return Replies(
        [flat[i : i + SAMPLES] for i in grouped],
        [verdicts[i : i + SAMPLES] for i in grouped],
        rewards.reshape(-1, SAMPLES),
        drawn.tokens.reshape(-1, SAMPLES, LONGEST_REPLY),
        drawn.lengths.reshape(-1, SAMPLES),
    )


def sequence_logps(
    model: Model, prompts: Sequence[str], tokens: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Compute log p(reply | prompt), nats, float64 [P], of replies int32 [P, T] with `lengths` int32 [P] tokens."""
    heads = Encoder(model.tokenizer).prompts(prompts)
    width = max(map(len, heads))
    ids = np.zeros((len(heads), width + tokens.shape[1]), np.int32)
    mask = np.zeros_like(ids)
    for row, head in enumerate(heads):  # padded on the left, so that all replies start in one column
        ids[row, width - len(head) : width] = head
        mask[row, width - len(head) : width + lengths[row]] = 1
    ids[:, width:] = tokens
    logps = jax.nn.log_softmax(model.logits(ids, mask)[:, width - 1 : -1], axis=-1)
    said = np.asarray(jnp.take_along_axis(logps, jnp.asarray(tokens)[:, :, None], axis=-1))[:, :, 0]
    return np.where(mask[:, width:] == 1, said, 0.0).sum(-1, dtype=np.float64)


def accuracies(scorer: Scorer, file: Path) -> dict[str, Estimate]:
    """Compute shares of pairs whose chosen reply scores strictly higher, by kind of mistake and over "all"."""
    records = data.load(file)
    scores = scorer.score_rows(records)
    right = scores["chosen_score"] > scores["rejected_score"]
    kinds = np.array([records[i]["mistake"] for i in range(len(records))])
    chosen = {"all": np.ones(len(kinds), bool)} | {kind: kinds == kind for kind in KINDS}
    return {kind: proportion(int(right[rows].sum()), int(rows.sum())) for kind, rows in chosen.items()}


def describe(replies: Replies) -> dict[str, Any]:
    """Measure one policy's replies without another policy."""
    first = [verdicts[0] for verdicts in replies.verdicts]
    best = replies.rewards.argmax(axis=1)
    mistakes = [mistake for verdict in first for mistake in verdict.mistakes]
    return {
        "success": proportion(sum(verdict.success for verdict in first), len(first)),
        "reward": mean(replies.rewards[:, 0]),
        "best_of_8": proportion(
            sum(verdicts[i].success for verdicts, i in zip(replies.verdicts, best, strict=True)), len(first)
        ),
        "length": mean(replies.lengths[:, 0]),
        "mistakes": {part: mistakes.count(part) / len(first) for part in Verdict._fields},
    }


def measure(directory: Path, heldout: Path, seed: int) -> dict[str, Any]:
    """Compute all figures of the closing table.

    directory: the run's, with the stages base, rm and policy done. heldout: where `pairs.heldout.jsonl` and
    `prompts.heldout.jsonl` are.
    """
    registry = installed_registry()
    before, after = (
        load_model(directory / stage / "artifacts" / "model", registry=registry)
        for stage in ("base", "policy")
    )
    scorer = Scorer.load(directory / "rm" / "artifacts" / "model", registry=registry, mesh=before.mesh)
    with open(heldout / "prompts.heldout.jsonl", encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    drawn = {
        name: draw(model, scorer, prompts, seed) for name, model in (("before", before), ("after", after))
    }
    tokens, lengths = drawn["after"].tokens[:, 0], drawn["after"].lengths[:, 0]
    policy, reference = (sequence_logps(model, prompts, tokens, lengths) for model in (after, before))
    good = scorer.score_completions(prompts, [parse_order(prompt).reply() for prompt in prompts])
    return {
        "prompts": len(prompts),
        "pair_accuracy": accuracies(scorer, heldout / "pairs.heldout.jsonl"),
        "before": describe(drawn["before"]),
        "after": describe(drawn["after"]),
        "good_reply_reward": mean(good),
        "kl": mean(policy - reference),
        "examples": [
            {
                "prompt": prompts[i],
                **{
                    name: {"reply": replies.texts[i][0], "mistakes": list(replies.verdicts[i][0].mistakes)}
                    for name, replies in drawn.items()
                },
            }
            for i in range(SHOWN)
        ],
    }
