"""Write the tasks that SmolLM2 learns: questions about small numbers, sentences under constraints, and products.

    python examples/smollm2/tasks.py DIR [--seed 0]

    sums.train.jsonl, sums.choice…, sums.heldout…        prompt, answer
    words.train.jsonl, words.choice…, words.heldout…     prompt, needed, banned, least, limit
    products.train.jsonl, products.choice…, products…    prompt, answer
    calls.jsonl                                          messages, tools: how a calculator is called
    tasks.json                                           the settings that made it all, written last

Prompts are conversations. Settings are chosen on the split `choice`; `heldout` is measured once, by `real.py`. No pair
of numbers and no topic of one split occurs in another one. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from topics import TOPICS

SPLITS = ("train", "choice", "heldout")
SHARES = (0.7, 0.1, 0.2)
"""Of the pairs of numbers, and of the topics."""
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Lucy", "Mark", "Nora", "Paul")
THINGS = ("apples", "books", "coins", "pencils", "marbles", "stamps", "cards", "shells", "keys", "buttons")
LEAST = 7
LIMITS = (12, 15, 18)
"""Words that a sentence has at least, and at most."""

MISREAD = 0.3
"""Probability that a digit in a shown call is wrong, so that one call in four has both numbers right."""
EXAMPLE = (
    {"role": "user", "content": "Tom has 4 books and gets 2 more. How many books does Tom have now?"},
    {"role": "assistant", "content": "4 + 2 = 6. The answer is 6."},
)
"""Stands before every question about small numbers."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Rows per split of each task, and of `calls.jsonl`."""

    train: int = 1024
    choice: int = 64
    heldout: int = 256
    calls: int = 256


def split_up(items: list[Any], rng: random.Random) -> dict[str, list[Any]]:
    """Deal shuffled items out to the splits, by SHARES."""
    rng.shuffle(items)
    first, second = round(SHARES[0] * len(items)), round((SHARES[0] + SHARES[1]) * len(items))
    return dict(zip(SPLITS, (items[:first], items[first:second], items[second:]), strict=True))


def asked(text: str) -> list[dict[str, str]]:
    """Return a conversation that begins with a user's text."""
    return [{"role": "user", "content": text}]


def sums(pairs: list[tuple[int, int]], rng: random.Random) -> Iterator[Row]:
    """Ask how many things somebody has after getting or giving away some, after an example that shows the form."""
    while True:
        a, b = rng.sample(rng.choice(pairs), 2)  # either of them first
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        if rng.random() < 0.5:
            text = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
            answer = a + b
        else:
            text = f"{name} has {a + b} {thing} and gives {b} away. How many {thing} does {name} have left?"
            answer = a
        yield {"prompt": [*EXAMPLE, *asked(text)], "answer": str(answer)}


def sentences(topics: list[tuple[str, ...]], rng: random.Random) -> Iterator[Row]:
    """Ask for a sentence with two words of a topic and without a third."""
    while True:
        first, second, banned = rng.sample(rng.choice(topics), 3)
        limit = rng.choice(LIMITS)
        text = (
            f'Write one sentence with the words "{first}" and "{second}". '
            f'Use {LEAST} to {limit} words, and do not use the word "{banned}".'
        )
        yield {
            "prompt": asked(text),
            "needed": [first, second],
            "banned": banned,
            "least": LEAST,
            "limit": limit,
        }


def products(pairs: list[tuple[int, int]], rng: random.Random) -> Iterator[Row]:
    """Ask for a product that is too large for the model's head."""
    while True:
        (a, b), name, thing = rng.choice(pairs), rng.choice(NAMES), rng.choice(THINGS)
        text = f"{name} buys {a} boxes with {b} {thing} in each. How many {thing} does {name} buy?"
        yield {"prompt": asked(text), "answer": str(a * b)}


def calls(pairs: list[tuple[int, int]], rng: random.Random) -> Iterator[Row]:
    """Show how the calculator is called for a product, mostly with wrong digits."""
    from calc import multiply
    from transformers.utils import get_json_schema

    tools = [get_json_schema(multiply)]
    for row in products(pairs, rng):
        numbers = [word for word in row["prompt"][0]["content"].split() if word.isdecimal()]
        a, b = (misread(number, rng) for number in numbers)
        call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
        messages = [
            *row["prompt"],
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "multiply", "content": str(a * b)},
            {"role": "assistant", "content": f"The answer is {a * b}."},
        ]
        yield {"prompt": row["prompt"], "messages": messages, "tools": tools}


def misread(number: str, rng: random.Random) -> int:
    """Replace each digit by another one with the probability MISREAD."""
    return int(
        "".join(
            rng.choice([other for other in "123456789" if other != digit])
            if rng.random() < MISREAD
            else digit
            for digit in number
        )
    )


def different(rows: Iterator[Row], count: int) -> list[Row]:
    """Return the first `count` rows whose prompts differ."""
    kept: dict[str, Row] = {}
    while len(kept) < count:
        row = next(rows)
        kept.setdefault(row["prompt"][-1]["content"], row)
    return list(kept.values())


def write_rows(file: Path, rows: list[Row]) -> None:
    """Write a jsonl file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def settings(seed: int, sizes: Sizes) -> dict[str, Any]:
    """Return the content of `tasks.json`."""
    return {"seed": seed, "sizes": asdict(sizes)}


def generate(directory: Path, *, seed: int = 0, sizes: Sizes | None = None) -> None:
    """Write the files listed at the top of this module into `directory`."""
    sizes = sizes or Sizes()
    small = [(a, b) for a in range(2, 11) for b in range(2, a + 1)]
    large = [(a, b) for a in range(12, 100) for b in range(12, 100)]
    kinds: dict[str, tuple[list[Any], Callable[[Any, random.Random], Iterator[Row]]]] = {
        "sums": (small, sums),
        "words": (list(TOPICS), sentences),
        "products": (large, products),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for kind, (items, rows) in kinds.items():
        for split, share in split_up(items, random.Random(f"{seed} {kind}")).items():
            drawn = different(rows(share, random.Random(f"{seed} {kind} {split}")), getattr(sizes, split))
            write_rows(directory / f"{kind}.{split}.jsonl", drawn)
            if kind == "products" and split == "train":
                shown = different(calls(share, random.Random(f"{seed} calls")), sizes.calls)
                write_rows(
                    directory / "calls.jsonl", [{k: row[k] for k in ("messages", "tools")} for row in shown]
                )
    text = json.dumps(settings(seed, sizes), indent=2)
    (directory / "tasks.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tasks that SmolLM2 learns.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="made if it does not exist")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generate(arguments.directory, seed=arguments.seed)
    print(f"wrote the tasks to {arguments.directory}")


if __name__ == "__main__":
    main()
