"""The task that both trainers learn, and what it is trained with: read by ours and by TRL's environment alike.

The quickstart's orders, and a rule in place of its reward model: 1 for a reply that `judge` finds right, else 0.
Nothing here needs more than Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
QUICKSTART = REPOSITORY / "plugins/tools/rlhf_tools/demo"
RUNS = REPOSITORY / "runs" / "learning"
RESULTS = HERE / "results"
sys.path.append(str(REPOSITORY / "plugins/tools"))

from rlhf_tools.demo.judge import judge  # noqa: E402  (after its directory is on the path)

SEEDS = (0, 1, 2)
UPDATES = 60
EVALUATION_STEPS = 10
EVALUATION_SAMPLES = 8
"""Completions of each held-out prompt in an evaluation."""
PROMPTS = 16
"""Of an update, in the file's order."""
GROUP = 8
ITERATIONS = 2
"""Updates on the same completions: in the second one the policy has moved, and clipping can act."""
LEARNING_RATE = 3e-4
"""Constant, without warmup: the two libraries count warmup differently."""
BETA = 0.02
LONGEST_PROMPT = 16
LONGEST_REPLY = 24
"""Tokens."""
STOP = 2
"""`<eos>`'s id in the quickstart's tokenizer."""

CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
LOSSES: Mapping[str, Mapping[str, float]] = {
    "grpo": CLIP,
    "bnpo": CLIP,
    "dr_grpo": CLIP,
    "dapo": CLIP,
    "cispo": {"epsilon_high": 5.0},
    "gspo": {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "gspo_token": {"epsilon": 3e-4, "epsilon_high": 4e-4},
    "sapo": {},
}
"""Every loss with its options; the rest is the trainer's default."""


def right(
    prompts: Sequence[str], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any
) -> list[float]:
    """The reward of both trainers: 1 for a right reply that ended by itself, else 0."""
    return [
        float(judge(prompt, reply, finished=ids[-1] == STOP).success)
        for prompt, reply, ids in zip(prompts, completions, completion_ids, strict=True)
    ]


def data(seed: int) -> Path:
    return RUNS / f"seed{seed}" / "data"


def base(seed: int) -> Path:
    """The initial weights, in Hugging Face's layout."""
    return RUNS / f"seed{seed}" / "base" / "artifacts" / "model"


def prompts(seed: int, *, held_out: bool = False) -> list[str]:
    file = data(seed) / ("prompts.heldout.jsonl" if held_out else "prompts.jsonl")
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in lines]


def read(file: Path) -> list[dict[str, Any]]:
    """Rows of a results file; none where it is not there yet."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def append(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with open(file, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
