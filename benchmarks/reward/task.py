"""What both trainers are given, and what they are trained with: read by ours and by TRL's environment alike.

Right and wrong solutions of GSM8K problems, on a pretrained language model. Nothing here needs more than Python.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RUNS = REPOSITORY / "runs" / "reward"
RESULTS = HERE / "results"

SEEDS = (0, 1, 2)
TRIAL = 10
"""The seed that learning rate and epochs were chosen on."""
FOLDS = 4
HELD_OUT = {0: 0, 1: 1, 2: 2, TRIAL: 3}
"""The fold of problems that each seed holds out: no two seeds share a held-out problem."""

LONGEST = 512
"""Tokens, prompt and EOS included: the model's context. A pair with a longer side is dropped."""
BATCH = 16
"""Pairs of an update, in the file's order, which is the same in every epoch."""
EPOCHS = 2
LEARNING_RATE = 3e-4
"""Constant, without warmup: the two libraries count warmup differently."""
CENTER = 0.01
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.0

SPEED_SEED = 0
SPEED_UPDATES = 60
LOG_STEPS = 10


def fold(problem: str) -> int:
    """Between 0 and FOLDS - 1, from the problem's text alone."""
    return hashlib.sha256(problem.encode("utf-8")).digest()[0] % FOLDS


def directory(seed: int) -> Path:
    return RUNS / f"seed{seed}"


def base(seed: int) -> Path:
    """The initial weights, with the reward head of the seed, in Hugging Face's layout."""
    return directory(seed) / "base"


def file(seed: int, part: str) -> Path:
    """Pairs as token ids; part: "train" or "heldout"."""
    return directory(seed) / f"{part}.jsonl"


def pairs(seed: int, part: str) -> list[dict[str, Any]]:
    """Rows `chosen_ids` and `rejected_ids`, whole sequences; `prompt_tokens`, how many both start with; `problem`."""
    return read(file(seed, part))


def useful_tokens(rows: Iterable[Mapping[str, Any]]) -> int:
    """Tokens of each pair's prompt, once, and of its two solutions."""
    return sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) - row["prompt_tokens"] for row in rows)


def updates(seed: int) -> list[list[dict[str, Any]]]:
    """The pairs of every update of an epoch."""
    rows = pairs(seed, "train")
    return [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]


def timing(trainer: str, started: float, logged: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """What a timed run reports.

    started: when the trainer was made, after all imports. logged: (updates done, when), at every LOG_STEPS. All in
    seconds since 1970. `steady` leaves out what comes before the first of them: opening, compiling, and LOG_STEPS
    updates.
    """
    epoch = [useful_tokens(batch) for batch in updates(SPEED_SEED)]
    (first, since), (last, until) = logged[0], logged[-1]

    def tokens(start: int, end: int) -> int:
        return sum(epoch[i % len(epoch)] for i in range(start, end))

    steady = until - since
    return {
        "trainer": trainer,
        "updates": last,
        "seconds": round(until - started, 3),
        "tokens": tokens(0, last),
        "steady_seconds": round(steady, 3),
        "steady_tokens": tokens(first, last),
        "startup_seconds": round(until - started - steady / (last - first) * last, 3),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; none where it is not there yet."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
