"""Write the pairs of each seed as token ids, and the weights that both trainers start from.

    python benchmarks/reward/prepare.py PAIRS.jsonl MODEL [--seed 0 1 2]

PAIRS has `prompt`, `chosen` and `rejected` as message lists of one message each. MODEL: a language model's directory.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import task

from rlhf_core import load_model
from rlhf_core.tokenizer.encoding import Encoder


def encode(pairs: Sequence[dict[str, Any]], encoder: Encoder) -> list[dict[str, Any]]:
    """Rows of `task.pairs` that are not too long, in the order given."""
    texts = [{side: row[side][0]["content"] for side in ("prompt", "chosen", "rejected")} for row in pairs]
    prompts = [text["prompt"] + "\n" for text in texts]
    opened = encoder.prompts(prompts)
    chosen, rejected = (
        encoder.whole(prompts, [text[side] for text in texts]) for side in ("chosen", "rejected")
    )
    return [
        {
            "problem": text["prompt"],
            "prompt_tokens": len(prompt),
            "chosen_ids": right.tolist(),
            "rejected_ids": wrong.tolist(),
        }
        for text, prompt, right, wrong in zip(texts, opened, chosen, rejected, strict=True)
        if max(len(right), len(wrong)) <= task.LONGEST
    ]


def prepare(pairs: Sequence[dict[str, Any]], model: str, seed: int) -> None:
    """Nothing where it was done before."""
    if task.base(seed).exists():
        return
    opened = load_model(model, "score", seed=seed)
    rows = encode(pairs, Encoder(opened.tokenizer))
    fold = task.HELD_OUT[seed]
    train = [row for row in rows if task.fold(row["problem"]) != fold]
    random.Random(seed).shuffle(train)
    train = train[: len(train) // task.BATCH * task.BATCH]
    for part, each in (
        ("train", train),
        ("heldout", [row for row in rows if task.fold(row["problem"]) == fold]),
    ):
        task.file(seed, part).unlink(missing_ok=True)
        task.append(task.file(seed, part), each)
        problems = len({row["problem"] for row in each})
        print(
            f"seed {seed}, {part}: {len(each)} pairs of {problems} problems, {task.useful_tokens(each)} tokens"
        )
    opened.save(task.base(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pairs and initial weights.")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, nargs="+", choices=tuple(task.HELD_OUT), default=task.SEEDS)
    arguments = parser.parse_args()
    for seed in arguments.seed:
        prepare(task.read(arguments.pairs), arguments.model, seed)


if __name__ == "__main__":
    main()
