"""Write the data of both works, and the weights that both trainers start from.

    python benchmarks/smollm2/prepare.py PAIRS.jsonl MODEL

PAIRS has `prompt`, `chosen` and `rejected` as conversations. MODEL is the directory that examples/smollm2/prepare.py
makes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import task
from tasks import generate
from transformers import AutoTokenizer

from rlhf_core import load_model
from rlhf_core.tokenizer.encoding import Encoder

PAD = "<|endoftext|>"
"""In place of the model's own, which ends texts too: transformers would then read a score one token before the end."""


def with_pad(model: Path, directory: Path) -> Path:
    """Copy a model's directory with PAD as pad token."""
    shutil.copytree(model, directory)
    pad = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(PAD)
    for name, change in (
        ("tokenizer_config.json", {"pad_token": PAD}),
        ("config.json", {"pad_token_id": pad}),
    ):
        file = directory / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    return directory


def encode(pairs: Sequence[dict[str, Any]], encoder: Encoder) -> list[dict[str, Any]]:
    """Rows of `task.pairs` that are not too long, in the order given."""
    prompts = [row["prompt"] for row in pairs]
    opened = encoder.prompts(prompts)
    chosen, rejected = (
        encoder.whole(prompts, [row[side] for row in pairs]) for side in ("chosen", "rejected")
    )
    return [
        {
            "problem": row["prompt"][0]["content"],
            "prompt_tokens": len(prompt),
            "chosen_ids": right.tolist(),
            "rejected_ids": wrong.tolist(),
        }
        for row, prompt, right, wrong in zip(pairs, opened, chosen, rejected, strict=True)
        if max(len(right), len(wrong)) <= task.LONGEST
    ]


def write_pairs(rows: list[dict[str, Any]]) -> None:
    """Deal the pairs out: TRAINED_PAIRS to train on, and of the others those whose problem is new."""
    random.Random(task.SEED).shuffle(rows)
    train = rows[: task.TRAINED_PAIRS]
    seen = {row["problem"] for row in train}
    rest = [row for row in rows[task.TRAINED_PAIRS :] if row["problem"] not in seen]
    for part, each in (("train", train), ("heldout", rest)):
        file = task.pairs_file(part)
        file.unlink(missing_ok=True)
        task.append(file, each)
        print(f"{part}: {len(each)} pairs of {len({row['problem'] for row in each})} problems")


def main() -> None:
    parser = argparse.ArgumentParser(description="Data and initial weights.")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    generate(task.RUNS / "data", seed=task.SEED)
    with tempfile.TemporaryDirectory() as place:
        model = str(with_pad(arguments.model, Path(place) / "model"))
        opened = load_model(model, "score", seed=task.SEED)
        write_pairs(encode(task.read(arguments.pairs), Encoder(opened.tokenizer)))
        opened.save(task.base("reward"))
        load_model(model).save(task.base("grpo"))


if __name__ == "__main__":
    main()
