"""What is compared: reward models trained on little, more and much preference data, and the policies they teach.

The tasks are the sentences of examples/smollm2, and gold is its judge, which no trainer sees but for the preferences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
EXAMPLE = REPOSITORY / "examples" / "smollm2"
RUNS = REPOSITORY / "runs" / "trust"
RESULTS = HERE / "results"
sys.path.append(str(EXAMPLE))

from judge import judge_sentence  # noqa: E402  (after its directory is on the path)

SEED = 0
PAIRS = (24, 96, 384)
"""Sizes of the preference data, each the beginning of the next; a tenth of the pairs is the wrong way round."""
PAIR_PROMPTS = 256
"""Prompts whose completions make the pairs."""
REWARD_UPDATES = 24
"""Of 16 pairs, for every size: 16, 4 and 1 epochs."""
LONGEST = 32
"""Tokens of a completion."""
TEMPERATURE = 0.7

HELD_OUT = 64
"""Prompts of best-of-n."""
SAMPLES = 32
"""Completions of each; n is at most that."""
UPDATES = 16
"""Of GRPO."""
PROMPTS, GROUP = 6, 8
"""Of an update, and completions of each."""
LEARNING_RATE = 5e-5


class Run(NamedTuple):
    """A policy.

    pairs: how many its reward model has seen. beta: the coefficient of the KL penalty. limit: the KL to the initial
    policy, nats per token, beyond which the run stops.
    """

    pairs: int
    beta: float = 0.0
    limit: float | None = None

    @property
    def name(self) -> str:
        parts = [f"{self.pairs} pairs"]
        parts += [f"`kl.beta` {self.beta:g}"] if self.beta else []
        parts += [f"`limits.kl` {self.limit:g}"] if self.limit else []
        return ", ".join(parts)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Run:
        """Return the run that a row of results/policies.jsonl belongs to."""
        return cls(row["pairs"], row["beta"], row["limit"])


POLICIES = (Run(24), Run(24, beta=0.1), Run(24, limit=0.6), Run(96), Run(384))
UNREACHED = 100.0
"""A limit with which the KL to the initial policy is logged, and no run stops."""


def gold(
    completions: Sequence[Sequence[Mapping[str, str]]],
    needed: Sequence[Sequence[str]],
    banned: Sequence[str],
    least: Sequence[int],
    limit: Sequence[int],
) -> list[float]:
    """Grade completions with the judge: the share of the four demands that a sentence meets."""
    names = ("needed", "banned", "least", "limit")
    rows = [dict(zip(names, row, strict=True)) for row in zip(needed, banned, least, limit, strict=True)]
    verdicts = [judge_sentence(row, said[-1]["content"]) for row, said in zip(rows, completions, strict=True)]
    return [sum(verdict.values()) / len(verdict) for verdict in verdicts]


def right(
    completions: Sequence[Sequence[Mapping[str, str]]],
    needed: Sequence[Sequence[str]],
    banned: Sequence[str],
    least: Sequence[int],
    limit: Sequence[int],
) -> list[float]:
    """Return 1 for a completion that meets all four demands, else 0."""
    return [float(grade == 1.0) for grade in gold(completions, needed, banned, least, limit)]


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; none where it is not there yet."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
