"""What is varied, one thing at a time, and how large everything else is meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SPEED = REPOSITORY / "benchmarks" / "speed"
RESULTS = Path(__file__).parent / "results" / "growth.jsonl"

SMALL = (128, 4, 4, 2, 344, 2048)
"""The shape `1m` as `works.Model` takes it; 10m and 50m are those of benchmarks/speed."""


@dataclass(frozen=True)
class Case:
    """One step to compile.

    axis: what is varied. work: W1, a reward step, or W2, a GRPO update with its reference.
    pairs, length: of W1, length tokens a sequence. prompts, group, prompt, completion: of W2.
    data, fsdp, tensor: the mesh.
    """

    axis: str
    work: str
    model: str = "10m"
    pairs: int = 8
    length: int = 256
    prompts: int = 2
    group: int = 4
    prompt: int = 64
    completion: int = 192
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def tokens(self) -> int:
        """Count the useful tokens per step, shared prompts once."""
        if self.work == "W1":
            return self.pairs * 2 * self.length
        return self.prompts * (self.prompt + self.group * self.completion)


def cases() -> Iterator[Case]:
    works = ("W1", "W2")
    for model in ("1m", "10m", "50m"):
        yield from (Case("model", work, model) for work in works)
    yield from (Case("length", "W1", length=length) for length in (256, 512, 1024, 2048, 4096))
    yield from (Case("group", "W2", group=group, prompt=1024) for group in (2, 4, 8, 16))
    yield from (Case("prompt", "W2", prompt=prompt) for prompt in (64, 256, 1024, 2048))
    for work in works:
        alone = Case("devices", work, "50m", prompts=8)  # a row for each of eight devices
        yield from (dataclasses.replace(alone, fsdp=count) for count in (1, 2, 4, 8))
        yield dataclasses.replace(alone, data=8)
        yield dataclasses.replace(alone, tensor=8)
