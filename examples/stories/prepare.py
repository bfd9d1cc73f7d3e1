"""Cut a text file of short stories into the data of `examples/stories.toml`. Needs nothing but Python.

    python examples/stories/prepare.py STORIES.txt examples/stories/data

STORIES.txt holds stories with a line `<|endoftext|>` between them, as TinyStories is published. Written are

    corpus.jsonl, corpus.heldout.jsonl      prompt: the first two sentences; completion: the three after them
    pairs.jsonl, pairs.heldout.jsonl        prompt; chosen: what follows in its story; rejected: what follows in another
    prompts.jsonl, prompts.heldout.jsonl    prompt: the first two sentences

Pairs are cut at two places of a story: after its opening, and before its ending. What is rejected for one prompt is
chosen for another, so neither length nor style gives it away: only the prompt does. A tenth of the stories is held out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

SEPARATOR = "<|endoftext|>"
SENTENCE_END = re.compile(r"""[.!?]["'”’]?(?=\s["'“‘]?[A-Z]|$)""")
OPENING, CONTINUATION = 2, 3
"""Sentences."""
HELD_OUT = 0.1


class Cut(NamedTuple):
    """A place in a story: the text before it, and the text after it."""

    before: str
    after: str


def read_stories(text: str) -> list[str]:
    """Read the stories of a file, in order, without duplicates or an unfinished last one."""
    found = [" ".join(story.split()) for story in text.split(SEPARATOR)]
    if found and not SENTENCE_END.search(found[-1][-2:]):
        found.pop()
    return list(dict.fromkeys(story for story in found if story))


def sentences(story: str) -> list[str]:
    """Split a story into sentences, each with the space before it."""
    ends = [match.end() for match in SENTENCE_END.finditer(story)]
    return [story[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def opening(parts: Sequence[str]) -> Cut:
    """Return the first sentences, and those after them."""
    return Cut("".join(parts[:OPENING]), "".join(parts[OPENING : OPENING + CONTINUATION]))


def ending(parts: Sequence[str]) -> Cut:
    """Return as many sentences, and the last of the story."""
    before = parts[-OPENING - CONTINUATION : -CONTINUATION]
    return Cut("".join(before).lstrip(), "".join(parts[-CONTINUATION:]))


def pairs(cuts: Sequence[Cut], random: random.Random) -> Iterable[dict[str, str]]:
    """Pair each cut's true continuation with another's; every continuation is rejected once."""
    order = list(range(len(cuts)))
    random.shuffle(order)
    for here, other in zip(order, order[1:] + order[:1], strict=True):
        cut = cuts[here]
        yield {"prompt": cut.before, "chosen": cut.after, "rejected": cuts[other].after}


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines):,} rows")


def prepare(text: str, directory: Path, *, seed: int = 0) -> None:
    """Write the six files to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    told = [
        parts
        for story in read_stories(text)
        if len(parts := sentences(story)) >= 2 * (OPENING + CONTINUATION)
    ]
    by_opening = {opening(parts).before: parts for parts in told}  # no opening is in both splits
    told = list(by_opening.values())
    chance.shuffle(told)
    kept = len(told) - round(HELD_OUT * len(told))
    for suffix, part in (("", told[:kept]), (".heldout", told[kept:])):
        openings = [opening(parts) for parts in part]
        both = [*pairs(openings, chance), *pairs([ending(parts) for parts in part], chance)]
        write(
            directory / f"corpus{suffix}.jsonl",
            ({"prompt": c.before, "completion": c.after} for c in openings),
        )
        write(directory / f"pairs{suffix}.jsonl", both)
        write(directory / f"prompts{suffix}.jsonl", ({"prompt": c.before} for c in openings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Cut stories into openings, continuations and preference pairs."
    )
    parser.add_argument("stories", type=Path, metavar="STORIES.txt")
    parser.add_argument("directory", type=Path, help="where the data goes")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    prepare(given.stories.read_text(encoding="utf-8"), given.directory, seed=given.seed)
