"""The least time that a program takes on a chip: the slowest of what it computes, reads, and sends.

Each is taken at the data sheet's full speed, and all of them at the same time (Williams et al. 2009): a run is slower.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.models.params import paths
from rlhf_topologies.chips import Chip
from rlhf_topologies.hlo import Counts

if TYPE_CHECKING:
    from rlhf_core.models import Definition


@dataclass(frozen=True)
class Bound:
    """Seconds that each part takes at least."""

    compute: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return max(asdict(self).values())

    @property
    def by(self) -> str:
        """Return what sets the bound: "compute", "memory", "link", "network" or "host"."""
        return max(asdict(self).items(), key=lambda item: item[1])[0]


def bound(counts: Counts, chip: Chip, host: float = 0.0) -> Bound:
    """Bound the time of what one device does. A dtype that the chip's table lacks is as fast as float32.

    host: bytes that it gets from the host's memory, or sends there: both ways work at the same time.
    """
    compute = sum(
        flops / chip.flops.get(dtype, chip.flops["f32"]) for dtype, flops in counts.products.items()
    )
    network = counts.network / chip.network if chip.network else 0.0
    moved = host / chip.host if chip.host else 0.0
    return Bound(compute, counts.bytes / chip.memory_bandwidth, counts.sent / chip.link, network, moved)


def token_weights(definition: Definition) -> int:
    """Count the parameters that each token is multiplied with: all but tables of embeddings, unless one is the head's,
    too, and of experts those that a token is sent to.
    """
    config = getattr(definition, "config", None)
    is_head = definition.head == "lm" and getattr(config, "tied", False)
    experts, used = getattr(config, "experts", 0), getattr(config, "experts_per_token", 0)
    total = 0.0
    for path, leaf in paths(definition.quantized_as(None).abstract_params()):
        if len(leaf.shape) < 2 or (path[-1] == "embedding" and not (is_head and path[0] == "embed_tokens")):
            continue
        share = used / experts if experts and "experts" in path else 1.0
        total += share * float(np.prod(leaf.shape))
    return round(total)
