"""The least time that a program takes on a chip: the slowest of what it computes, reads, and sends.

Each is taken at the data sheet's full speed, and all of them at the same time (Williams et al. 2009): a run is slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.mesh import ROW_AXES
from rlhf_core.models import Decoder
from rlhf_core.models.params import paths
from rlhf_core.training.memory import remat_of
from rlhf_topologies.chips import Chip, Topology
from rlhf_topologies.hlo import Counts

if TYPE_CHECKING:
    from rlhf_core.models import Definition
    from rlhf_topologies.description import Program, ProgramShape


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


SCORES = {"train": 20, "read": 6}
"""Times that a pass reads or writes attention's logits, float32."""
WIDTHS = {"train": 120, "read": 40}
"""Values per token that each layer reads or writes besides, in multiples of the hidden size."""


def expected(program: Program, shape: ProgramShape, mesh: Mapping[str, int], topology: Topology) -> Bound:
    """Estimate the bound of a program from its shape alone, to compare settings before anything is compiled.

    mesh: {axis: devices}. Counted are the products of weights and of attention, what is read and written for them, and
    what devices send: gathered weights, reduced gradients and sums of activations.
    """
    config, weights = getattr(shape.model, "config", None), token_weights(shape.model)
    layers, heads = getattr(config, "num_layers", 1), getattr(config, "num_heads", 1)
    width, tensor = shape.model.hidden_size, shape.tensor or mesh["tensor"]
    if program.work == "sample" and not program.steps:  # it moves the weights
        return _bound(topology, {"tensor": shape.memory or 0}, {"tensor": topology.machine})
    if program.work == "sample":
        rows = program.steps * shape.rows / topology.count
        sums = 4 * layers * width * rows * (tensor - 1)  # two of bfloat16 per layer
        once = program.steps * ((shape.memory if shape.step_bytes is None else shape.step_bytes) or 0)
        return _bound(topology, {"tensor": sums}, {"tensor": tensor}, 2 * weights * rows, once)
    trains = program.work == "train"
    again = trains and remat_of(shape.model, (shape.rows, shape.time)) == "full"
    passes = 3 + again if trains else 1
    data, fsdp, expert = (mesh.get(axis, 1) for axis in ROW_AXES)
    cut = mesh.get("context", 1)
    rows = -(-shape.rows // (data * fsdp * expert))
    tokens = rows * -(-shape.time // cut)
    logits = tokens * shape.time / 2 * layers * heads / tensor  # causal
    size = _head_size(shape.model)
    dense, experts = all_weights(shape.model)
    memory = (
        passes * 2 * (dense + experts / expert) / tensor
        + 2 * WIDTHS[program.work] * tokens * width * layers / tensor
    )
    # Other kernels keep logits out of memory.
    if getattr(shape.model, "attention", None) is None and cut == 1:
        memory += 4 * SCORES[program.work] * logits
    gathered = dense * _others(fsdp * expert * cut) + experts / expert * _others(fsdp * cut)
    both = 2 * size * getattr(config, "num_kv_heads", heads) / tensor  # of a key and a value, in a layer
    pairs = (
        tokens * layers * getattr(config, "experts_per_token", 0)
    )  # of a token and an expert that it is sent to
    sent = {
        "tensor": 8 * layers * tokens * width * (passes - trains) * _others(mesh["tensor"]),
        "expert": 2 * pairs * width * (2 * (passes - trains) + 3 * trains) * _others(expert),
        "fsdp": 2 * gathered / tensor * (3 if trains else 1),
        "context": 2 * both * layers * rows * shape.time * (passes - trains) * _others(cut),
        "data": 8 * (dense + experts) / tensor / (fsdp * expert * cut) * _others(data) if trains else 0,
    }
    return _bound(topology, sent, mesh, passes * (2 * weights / tensor * tokens + 4 * size * logits), memory)


def _head_size(definition: Definition) -> float:
    """Return the size of a head, on average over the layers."""
    config: Any = getattr(definition, "config", None)
    if not isinstance(definition, Decoder):
        return getattr(config, "head_dim", definition.hidden_size // getattr(config, "num_heads", 1))
    each = [stack.config.head_dim * len(stack.layers) for stack in config.stacks.values()]
    return sum(each) / config.num_layers


def _bound(
    topology: Topology,
    sent: Mapping[str, float],
    mesh: Mapping[str, int],
    flops: float = 0.0,
    memory: float = 0.0,
) -> Bound:
    """Bound the time of what a device computes, reads and sends along the axes of a mesh.

    An axis that reaches beyond a machine sends through the network.
    """
    chip, reach, link, network = topology.chip, 1, 0.0, 0.0
    for axis in ("tensor", "context", "expert", "fsdp", "data"):
        reach *= mesh.get(axis, 1)
        if reach > topology.machine and chip.network:
            network += sent.get(axis, 0) / chip.network
        else:
            link += sent.get(axis, 0) / chip.link
    return Bound(flops / chip.flops["bf16"], memory / chip.memory_bandwidth, link, network)


def _others(devices: int) -> float:
    """Return the share of an array that a device has from others, or sends them."""
    return (devices - 1) / devices


def all_weights(definition: Definition) -> tuple[int, int]:
    """Count the parameters of `token_weights` without experts, and those of all experts."""
    config = getattr(definition, "config", None)
    sizes = [
        math.prod(leaf.shape)
        for path, leaf in paths(definition.quantized_as(None).abstract_params())
        if "experts" in path
    ]
    used, total = getattr(config, "experts_per_token", 0), sum(sizes)
    return token_weights(definition) - round(total * used / max(getattr(config, "experts", 1), 1)), total


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
