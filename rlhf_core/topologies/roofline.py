"""The least time that a program takes on a chip: the slowest of what it computes, reads, and sends.

Each is taken at the data sheet's full speed, and all of them at the same time (Williams et al. 2009): a run is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.topologies.chips import Chip
from rlhf_core.topologies.hlo import Counts


@dataclass(frozen=True)
class Bound:
    """Seconds that each part takes at least."""

    compute: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.compute, self.memory, self.link, self.network)

    @property
    def by(self) -> str:
        """Return what sets the bound: "compute", "memory", "link" or "network"."""
        return max(("compute", "memory", "link", "network"), key=lambda name: getattr(self, name))


def bound(counts: Counts, chip: Chip) -> Bound:
    """Bound the time of what one device does."""
    compute = sum(flops / speed(chip, dtype) for dtype, flops in counts.products.items())
    network = counts.network / chip.network if chip.network else 0.0
    return Bound(compute, counts.bytes / chip.memory_bandwidth, counts.sent / chip.link, network)


def speed(chip: Chip, dtype: str) -> float:
    """Return the operations per second for factors of a dtype as HLO writes it; of float32 where the table lacks it."""
    return chip.flops.get(dtype, chip.flops["f32"])


def main_loop(loops: Sequence[Counts]) -> Counts:
    """Return the loop that moves most: the decoding of tokens, beside what fills slots. Empty where there is none."""
    return max(loops, key=lambda loop: loop.bytes, default=Counts())
