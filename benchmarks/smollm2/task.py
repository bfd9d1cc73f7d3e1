"""What both trainers are given, and what they are trained with: read by ours and by TRL's environment alike.

Run b of examples/smollm2, and a reward model on right and wrong solutions of problems. Nothing here needs more than
Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
EXAMPLE = REPOSITORY / "examples" / "smollm2"
RUNS = REPOSITORY / "runs" / "smollm2-trl"
RESULTS = HERE / "results"
sys.path.append(str(EXAMPLE))

from rewards import sentence  # noqa: E402  (after its directory is on the path)

SEED = 0
WORKS = ("grpo", "reward")

UPDATES = 20
PROMPTS = 8
"""Of an update, in the file's order."""
GROUP = 8
LONGEST_PROMPT = 96
LONGEST_COMPLETION = 32
"""Tokens."""
TEMPERATURE = 0.7
LEARNING_RATE = 3e-5
"""Constant, without warmup: the two libraries count warmup differently."""
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}

TRAINED_PAIRS = 500
PAIRS = 10
"""Of an update, in the file's order: 50 updates in an epoch."""
LONGEST = 512
REWARD_LEARNING_RATE = 2e-5
CENTER = 0.01

FIRST = 3
"""Updates that the median of seconds leaves out: compiling, and memory that is touched for the first time."""


def base(work: str) -> Path:
    """The initial weights in Hugging Face's layout; for "reward" with the reward head."""
    return RUNS / f"base-{work}"


def prompts() -> list[dict[str, Any]]:
    """Rows `prompt`, a conversation, and the columns that `reward` reads."""
    return read(RUNS / "data" / "words.train.jsonl")


def pairs(part: str) -> list[dict[str, Any]]:
    """Rows `chosen_ids` and `rejected_ids`, whole sequences, `prompt_tokens`, `problem`; part: "train" or "heldout"."""
    return read(pairs_file(part))


def pairs_file(part: str) -> Path:
    return RUNS / f"pairs.{part}.jsonl"


def reward(
    completions: Sequence[Sequence[Mapping[str, str]]],
    needed: Sequence[Sequence[str]],
    banned: Sequence[str],
    least: Sequence[int],
    limit: Sequence[int],
    **_: Any,
) -> list[float]:
    """The reward of both trainers."""
    return sentence(completions, needed, banned, least, limit)


def timing(over: Sequence[float], began: float) -> dict[str, Any]:
    """Seconds of each update, and of what came before the end of the first one.

    over: when each update was over. began: when the trainer was made, after all imports.
    """
    seconds = [round(after - before, 3) for before, after in pairwise(over)]
    return {"until_first_update": round(over[0] - began, 3), "seconds": seconds}


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; none where it is not there yet."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
