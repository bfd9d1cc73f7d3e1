"""Devices as a mesh of three axes, and one table from the logical axes of parameters to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_core.errors import InputError

AXES = ("data", "fsdp", "tensor")
RULES: Mapping[str, str | None] = {
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
}
"""Logical axis of a parameter → mesh axis."""


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over `devices` (default: all). At most one size may be -1: what is left.

    Raises InputError where the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise InputError(
            f"mesh: sizes are positive, one may be -1; got data={data}, fsdp={fsdp}, tensor={tensor}"
        )
    known = math.prod(s for s in sizes if s != -1)
    if len(devices) % known or (-1 not in sizes and known != len(devices)):
        raise InputError(
            f"mesh: data={data} × fsdp={fsdp} × tensor={tensor} does not fit {len(devices)} device(s); "
            "set one of them to -1"
        )
    sizes = [len(devices) // known if s == -1 else s for s in sizes]
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def param_shardings(mesh: Mesh, axes: Any, abstract: Any) -> Any:
    """NamedShardings for a tree of parameters.

    axes: the same tree, with a tuple of logical axis names at every leaf. A mesh axis that does not divide its
    dimension is dropped: the parameter is then replicated along it.
    """

    def one(leaf: Any, names: tuple[str | None, ...]) -> NamedSharding:
        spec = []
        for size, name in zip(leaf.shape, names, strict=True):
            axis = RULES.get(name) if name is not None else None
            spec.append(axis if axis is not None and size % mesh.shape[axis] == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(one, abstract, axes)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are spread over `data` and `fsdp`, whatever follows the first axis."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def row_multiple(mesh: Mesh) -> int:
    """The number of rows of a batch is a multiple of this."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def put_rows(mesh: Mesh, batch: Any) -> Any:
    """Host arrays [rows, ...], the same on every process, onto the mesh; each process reads its own part of them."""
    sharding = row_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda idx: x[idx]), batch)


def abstract_rows(mesh: Mesh, batch: Any) -> Any:
    """What `put_rows` makes of `batch`, as shapes: for programs that are compiled before there is a batch."""
    sharding = row_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
