"""Write preference pairs about sentences: sampled completions, compared by the judge, a tenth of them the wrong way.

    python examples/smollm2/pairs.py DIR MODEL [--seed 0]

DIR/words.train.jsonl must be there. DIR/pairs.jsonl gets prompt, chosen, rejected, flipped. MODEL samples completions
at a low and at a high temperature, so that a reward model sees good and bad ones. The better one of a pair is that in
which more of the judge's parts hold; prompts whose completions are all equally good are left out.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from judge import judge
from measure import complete, read_rows
from tasks import Row

if TYPE_CHECKING:
    from rlhf_core.models import Model

TEMPERATURES = (0.7, 1.0)
PER_TEMPERATURE = 4
"""Completions of a prompt."""
PER_PROMPT = 2
"""Pairs, at most."""
FLIPPED = 0.1
"""Share of the pairs that prefer the worse completion."""


def pairs_of(row: Row, completions: list[tuple[str, bool]], rng: random.Random) -> list[dict[str, Any]]:
    """Pair the best completions of a row with others: at most PER_PROMPT pairs, none of two that are equally good."""
    graded = [(sum(judge(row, text, finished=end).values()), text) for text, end in dict(completions).items()]
    rng.shuffle(graded)
    graded.sort(key=lambda entry: -entry[0])
    best = [text for grade, text in graded if grade == graded[0][0]]
    worse = [text for grade, text in graded if grade < graded[0][0]]
    rng.shuffle(worse)
    rows = []
    for good, bad in list(zip(best, worse, strict=False))[:PER_PROMPT]:
        flipped = rng.random() < FLIPPED
        chosen, rejected = (bad, good) if flipped else (good, bad)
        rows.append(
            {"prompt": row["prompt"], "chosen": said(chosen), "rejected": said(rejected), "flipped": flipped}
        )
    return rows


def said(text: str) -> list[dict[str, str]]:
    """Return a completion as a conversation goes on."""
    return [{"role": "assistant", "content": text}]


def write_pairs(directory: Path, model: Model, *, prompts: int, seed: int = 0, longest: int = 32) -> int:
    """Write `pairs.jsonl` from the first `prompts` rows; return how many pairs it has.

    longest: tokens of a completion.
    """
    rows = read_rows(directory / "words.train.jsonl")[:prompts]
    sampled: list[list[tuple[str, bool]]] = [[] for _ in rows]
    for temperature in TEMPERATURES:
        drawn = complete(
            model,
            [row["prompt"] for row in rows],
            seed,
            temperature=temperature,
            max_completion_length=longest,
            num_generations=PER_TEMPERATURE,
        )
        for index, completions in enumerate(sampled):
            completions += drawn[index * PER_TEMPERATURE : (index + 1) * PER_TEMPERATURE]
    rng = random.Random(f"{seed} pairs")
    pairs = [pair for row, each in zip(rows, sampled, strict=True) for pair in pairs_of(row, each, rng)]
    rng.shuffle(pairs)
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (directory / "pairs.jsonl").write_text(text, encoding="utf-8")
    return len(pairs)


def main() -> None:
    from rlhf_core import load_model

    parser = argparse.ArgumentParser(description="Write preference pairs about sentences.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="has words.train.jsonl")
    parser.add_argument("model", metavar="MODEL", help="a directory or a hub name")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count = write_pairs(
        arguments.directory, load_model(arguments.model), prompts=arguments.prompts, seed=arguments.seed
    )
    print(f"wrote {count} pairs to {arguments.directory / 'pairs.jsonl'}")


if __name__ == "__main__":
    main()
