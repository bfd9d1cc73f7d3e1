"""Devices as a mesh of three axes, and one table from the logical axes of parameters to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_core.errors import InputError

AnyMesh: TypeAlias = Mesh | AbstractMesh
AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
"""Those that rows are spread over."""
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
    sizes = _sizes(len(devices), data, fsdp, tensor)
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def planned_mesh(count: int, data: int = -1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    """`make_mesh` of `count` devices that need not be there: shapes and shardings can be told, nothing computed."""
    return AbstractMesh(_sizes(count, data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def _sizes(count: int, data: int, fsdp: int, tensor: int) -> tuple[int, ...]:
    """Of the axes, of `count` devices. Raises InputError where they do not fit."""
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise InputError(
            f"mesh: sizes are positive, one may be -1; got data={data}, fsdp={fsdp}, tensor={tensor}"
        )
    known = math.prod(s for s in sizes if s != -1)
    if -1 not in sizes and known != count:
        raise InputError(
            f"mesh: data={data} × fsdp={fsdp} × tensor={tensor} does not fit {count} device(s); "
            "set one of them to -1"
        )
    left = count
    for axis, size in zip(reversed(AXES), reversed(sizes), strict=True):
        if size != -1 and left % size:
            fits = max(d for d in range(1, size) if left % d == 0)
            raise InputError(
                f"mesh.{axis}: {size} does not fit {count} device(s), it must divide {left}; "
                f"set mesh.{axis} = {fits}"
            )
        left //= 1 if size == -1 else size
    return tuple(left if s == -1 else s for s in sizes)


def param_shardings(mesh: AnyMesh, axes: Any, abstract: Any) -> Any:
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


def replicated_sharding(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def row_sharding(mesh: AnyMesh) -> NamedSharding:
    """Rows are spread over ROW_AXES, whatever follows the first axis."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def mesh_of_rows(x: jax.Array) -> AbstractMesh | None:
    """The mesh that the rows of `x`, [rows, ...], can be spread over: that of the arrays it is made from, if it divides
    them and the compiler places them, as it does not within `jax.shard_map`. Otherwise None.
    """
    mesh: AbstractMesh = jax.typeof(x).sharding.mesh
    if mesh.size == 1 or not set(AXES) <= set(mesh.axis_names) or set(mesh.axis_types) != {AxisType.Auto}:
        return None
    return None if x.shape[0] % row_multiple(mesh) else mesh


def with_rows_of(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x` [rows, ...], its rows spread over the mesh of `like`, [rows, ...]; for use inside jit.

    Without it the compiler follows the embedding table, which `fsdp` splits along the hidden dimension: then every
    device computes all rows, and sums of activations go between the devices in place of parameters.
    """
    mesh = mesh_of_rows(like)
    return x if mesh is None else jax.lax.with_sharding_constraint(x, row_sharding(mesh))


def row_multiple(mesh: AnyMesh) -> int:
    """The number of rows of a batch is a multiple of this."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def rows_per_device(mesh: AnyMesh | None, rows: int) -> int:
    """How many of `rows` rows each device computes, the empty ones that fill them up included; all without a mesh."""
    return rows if mesh is None else -(-rows // row_multiple(mesh))


def put_rows(mesh: Mesh, batch: Any) -> Any:
    """Host arrays [rows, ...], the same on every process, onto the mesh; each process reads its own part of them."""
    sharding = row_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda idx: x[idx]), batch)


def fetch_array(x: Any) -> np.ndarray:
    """Copy a whole array to the host, on every process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def abstract_rows(mesh: Mesh, batch: Any) -> Any:
    """What `put_rows` makes of `batch`, as shapes: for programs that are compiled before there is a batch."""
    sharding = row_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
