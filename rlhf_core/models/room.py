"""Whether a fresh model's parameters fit into the memory that there is."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import jax

from rlhf_core.errors import InputError
from rlhf_core.models.params import paths

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.models.definition import Definition


def require_room(definition: Definition, mesh: Mesh) -> None:
    """Raise InputError, before anything is allocated, where the parameters alone are more than the mesh's memory."""
    count = sum(math.prod(leaf.shape) for _, leaf in paths(definition.abstract_params()))
    room = _memory(mesh)
    if room is not None and 4 * count > room:
        raise InputError(
            f"model: its sizes make {count:,} parameters, {4 * count / 1e9:,.1f} GB in float32, and there are "
            f"{room / 1e9:,.1f} GB of memory: make it smaller, or use more devices"
        )


def _memory(mesh: Mesh) -> int | None:
    """Bytes of all devices of the mesh; those of the machines where they are CPUs, None where nobody tells."""
    device = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    if device.platform == "cpu":
        if "SC_PHYS_PAGES" not in os.sysconf_names:
            return None
        return jax.process_count() * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit) * mesh.size
