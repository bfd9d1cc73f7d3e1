"""Measure every finished policy, ours and TRL's, with one sampler: the share of right replies to held-out orders.

    python benchmarks/learning/heldout.py [--seed 0 1 2]

Writes results/heldout.jsonl: trainer, loss, seed, `right` and `gain` (over the initial weights), each with its 95 %
interval, and `kl` and `entropy`. Prompts, not completions, are the independent draws: an interval is mean ± 1.96
standard errors over prompts of their shares, and of the differences for `gain`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import task

from rlhf_core import SamplerInputs, load_model
from rlhf_core.sampling import Sampler, SamplingOptions
from rlhf_core.tokenizer import Encoder

if TYPE_CHECKING:
    from rlhf_core.models import Model

FILE = task.RESULTS / "heldout.jsonl"
Z = 1.959964
"""The normal distribution's 97.5 % quantile."""
ROWS = 512
"""Replies on the device at once, where their probabilities are read."""


class Replies(NamedTuple):
    """EVALUATION_SAMPLES replies to each of P held-out prompts."""

    shares: np.ndarray
    """float64 [P], of right ones."""
    prompts: Sequence[np.ndarray]
    """int32 [length] each, one a reply."""
    tokens: np.ndarray
    """int32 [P × EVALUATION_SAMPLES, LONGEST_REPLY]."""
    lengths: np.ndarray
    """int32 [P × EVALUATION_SAMPLES]."""


def draw(model: Model, seed: int) -> Replies:
    """Sample at temperature 1 and judge."""
    prompts = task.prompts(seed, held_out=True)
    ids = Encoder(model.tokenizer).prompts(prompts)
    sampler = Sampler(
        SamplerInputs(
            definition=model.definition,
            options=SamplingOptions(temperature=1.0, max_completion_length=task.LONGEST_REPLY),
            mesh=model.mesh,
            stop_ids=model.stop_ids,
            num_generations=task.EVALUATION_SAMPLES,
            prompts_per_call=64,
            max_prompt_length=max(map(len, ids)),
        )
    )
    drawn = sampler(model.params, ids, jax.random.key(seed))
    replies = [row[:n].tolist() for row, n in zip(drawn.tokens, drawn.lengths, strict=True)]
    assert model.tokenizer is not None
    texts = model.tokenizer.batch_decode(replies, skip_special_tokens=True)
    asked = [prompt for prompt in prompts for _ in range(task.EVALUATION_SAMPLES)]
    right = np.array(task.right(asked, texts, replies)).reshape(len(prompts), -1)
    heads = [head for head in ids for _ in range(task.EVALUATION_SAMPLES)]
    return Replies(right.mean(1), heads, drawn.tokens, drawn.lengths)


def nats(policy: Model, reference: Model, replies: Replies) -> tuple[float, float]:
    """(KL(policy ‖ reference), entropy of the policy), nats per token: means over the tokens of `replies` of sums
    over the whole vocabulary, which have none of the noise of an estimate from the sampled token.
    """
    width = max(map(len, replies.prompts))
    ids = np.zeros((len(replies.tokens), width + task.LONGEST_REPLY), np.int32)
    mask = np.zeros_like(ids)
    for row, (head, length) in enumerate(zip(replies.prompts, replies.lengths, strict=True)):
        ids[row, width - len(head) : width] = head  # on the left, so that all replies start in one column
        mask[row, width - len(head) : width + length] = 1
    ids[:, width:] = replies.tokens
    totals = np.zeros(2)
    for first in range(0, len(ids), ROWS):
        rows = slice(first, first + ROWS)
        p, q = (
            jax.nn.log_softmax(model.logits(ids[rows], mask[rows])[:, width - 1 : -1], axis=-1)
            for model in (policy, reference)
        )
        each = jnp.stack([jnp.sum(jnp.exp(p) * (p - q), -1), -jnp.sum(jnp.exp(p) * p, -1)])
        totals += np.asarray((each * mask[rows, width:]).sum((1, 2)), np.float64)
    kl, entropy = totals / replies.lengths.sum()
    return round(float(kl), 4), round(float(entropy), 4)


def estimate(values: np.ndarray) -> list[float]:
    """[mean, low, high]."""
    mean, half = float(values.mean()), Z * float(values.std(ddof=1)) / math.sqrt(len(values))
    return [round(x, 4) for x in (mean, mean - half, mean + half)]


def measure(seed: int) -> Iterator[dict[str, Any]]:
    directory = task.RUNS / f"seed{seed}"
    base = load_model(task.base(seed))
    before = draw(base, seed)
    kl, entropy = nats(base, base, before)
    run = {"trainer": "none", "loss": None, "seed": seed}
    yield {**run, "right": estimate(before.shares), "gain": None, "kl": kl, "entropy": entropy}
    found = {("ours", loss): directory / f"ours-{loss}" / "artifacts" / "model" for loss in task.LOSSES}
    found["trl", "dapo"] = directory / "trl-dapo"
    for (trainer, loss), path in found.items():
        if path.exists():
            model = load_model(path)
            after = draw(model, seed)
            kl, entropy = nats(model, base, after)
            run = {"trainer": trainer, "loss": loss, "seed": seed}
            right, gain = estimate(after.shares), estimate(after.shares - before.shares)
            yield {**run, "right": right, "gain": gain, "kl": kl, "entropy": entropy}


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out success of every finished run.")
    parser.add_argument("--seed", type=int, nargs="+", default=task.SEEDS)
    rows = [row for seed in parser.parse_args().seed for row in measure(seed)]
    FILE.unlink(missing_ok=True)
    task.append(FILE, rows)


if __name__ == "__main__":
    main()
