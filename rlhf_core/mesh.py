"""The device mesh of five axes, and the table that maps logical axes of parameters to mesh axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from rlhf_core.errors import InputError, counted, suggest

__all__ = ["make_mesh", "over_pieces", "put_rows"]


AnyMesh: TypeAlias = Mesh | AbstractMesh
AXES = ("data", "fsdp", "expert", "context", "tensor")
ROW_AXES = ("data", "fsdp", "expert")
"""The mesh axes that rows are sharded over. `context` cuts each row along time, see `cut_rows`."""
SPREAD = ("fsdp", "expert", "context")
"""The mesh axes that parameters are spread over, and gathered from where they are used. Only experts are not gathered
over `expert`, which spreads them by their number: tokens are sent to them."""
OPTIONAL = ("expert", "context")
"""The mesh axes that are not mentioned where their size is 1."""
RULES: Mapping[str, tuple[str, ...]] = {
    "experts": ("expert",),
    "embed": SPREAD,
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "peers": ("tensor",),
}
"""{logical axis of a parameter: mesh axes}. A mesh axis is used once, by the first logical axis that has it. `peers`
are the experts in a sampler."""


SAME_AXES = {"sp": "context"}
"""Other names of axes."""


def named_axes(mesh: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Name the axes of a mesh as `AXES` does."""
    named: dict[str, Any] = {}
    for name, size in mesh.items():
        axis = SAME_AXES.get(name, name)
        if axis in named:
            problems.append(f"mesh.{axis}: given twice, sp is another name of it; remove one")
        named[axis] = size
    return named


def axis_sizes(value: Any, problems: list[str]) -> dict[str, int]:
    """Read {axis: devices} as a pipeline file or a Python trainer has it, with what is wrong with it."""
    if not isinstance(value, Mapping):
        problems.append(f"mesh: write mesh = {{ data = -1, fsdp = 1, tensor = 1 }}; got {value!r}")
        return {}
    sizes = {}
    for axis, size in named_axes(value, problems).items():
        if axis not in AXES:
            problems.append(f"mesh.{axis}: unknown axis.{suggest(axis, AXES)} Axes: {', '.join(AXES)}")
        elif not isinstance(size, int) or isinstance(size, bool) or size == 0 or size < -1:
            problems.append(
                f"mesh.{axis}: a positive number of devices, or -1 for all remaining devices; got {size!r}"
            )
        else:
            sizes[axis] = size
    if list(({"data": -1} | sizes).values()).count(-1) > 1:
        axes_text = ", ".join(f"{axis} = {size}" for axis, size in ({"data": -1} | sizes).items())
        problems.append(f"mesh: only one size may be -1 (the default of data); got {axes_text}")
    return sizes


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Make a mesh over `devices` (default: all). At most one size may be -1, and takes the remaining devices.

    Raises InputError if the product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = _sizes(len(devices), (data, fsdp, expert, context, tensor))
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def planned_mesh(
    count: int, data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1, context: int = 1
) -> AbstractMesh:
    """Make an abstract mesh of `count` devices that need not exist: for shapes and shardings, not for computing."""
    sizes = _sizes(count, (data, fsdp, expert, context, tensor))
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _sizes(count: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Compute the size of every axis over `count` devices. Raises InputError if they do not fit."""
    named = zip(AXES, sizes, strict=True)
    each = [f"{axis}={size}" for axis, size in named if size != 1 or axis not in OPTIONAL]
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise InputError(f"mesh: sizes are positive, one may be -1; got {', '.join(each)}")
    known = math.prod(s for s in sizes if s != -1)
    if -1 not in sizes and known != count:
        raise InputError(
            f"mesh: {' × '.join(each)} does not fit {counted(count, 'devices')}; set one of them to -1"
        )
    left = _remaining(count, sizes)
    return tuple(left if s == -1 else s for s in sizes)


def _remaining(count: int, sizes: Sequence[int]) -> int:
    """Compute the devices that an axis of size -1 gets. Raises InputError for the first size that does not divide."""
    left = count
    for axis, size in zip(reversed(AXES), reversed(sizes), strict=True):
        if size == -1:
            continue
        if left % size:
            fits = max(d for d in range(1, size) if left % d == 0)
            raise InputError(
                f"mesh.{axis}: {size} does not fit {counted(count, 'devices')}: it must divide {left}; "
                f"set mesh.{axis} = {fits}"
            )
        left //= size
    return left


def param_shardings(mesh: AnyMesh, axes: Any, abstract: Any) -> Any:
    """Choose a NamedSharding for every leaf of a tree of parameters.

    axes: the same tree, with a tuple of logical axis names at every leaf. A parameter is replicated along a mesh axis
    that does not divide its dimension.
    """

    def leaf_sharding(leaf: Any, names: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(mesh, param_spec(mesh, names, leaf.shape))

    return jax.tree.map(leaf_sharding, abstract, axes)


def param_spec(mesh: AnyMesh, names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """Choose the mesh axes of a parameter's dimensions, of whose logical axes `names` are the names."""
    spec: list[str | tuple[str, ...] | None] = []
    used: set[str] = set()
    for size, name in zip(shape, names, strict=True):
        axes = tuple(
            axis
            for axis in RULES.get(name or "", ())
            if axis not in used and (axis not in OPTIONAL or mesh.shape[axis] > 1)
        )
        while axes and size % math.prod(mesh.shape[axis] for axis in axes):
            axes = axes[:-1]
        used.update(axes)
        spec.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*spec)


def replicated_sharding(mesh: AnyMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


HOST = "pinned_host"
"""The kind of memory of arrays that wait in the host's memory."""


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in the hosts' memory."""
    return sharding.with_memory_kind(HOST)


def on_device(sharding: NamedSharding) -> NamedSharding:
    """Return the same sharding in the devices' memory."""
    return sharding.with_memory_kind("device")


_parts: ContextVar[int] = ContextVar("parts", default=1)


def over_parts(function: Callable[[Any, Any], Any], mesh: Mesh) -> Callable[[Any, Any], Any]:
    """Call function(rows, other) for each part that `data` cuts the rows into; for use inside jit.

    rows: arrays [rows, ...]. other, and the results: arrays [parts, ...], sharded over `data`. Devices of different
    parts send each other nothing, unless the function calls `sum_over_parts`.
    """
    count = mesh.shape["data"]
    spread = NamedSharding(mesh, PartitionSpec("data", ROW_AXES[1:]))
    mapped = jax.vmap(function, axis_name="parts", spmd_axis_name="data")

    def cut(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x.reshape(count, x.shape[0] // count, *x.shape[1:]), spread)

    def call(rows: Any, other: Any) -> Any:
        rows = jax.tree.map(cut, rows)
        token = _parts.set(count)
        try:
            return mapped(rows, other)
        finally:
            _parts.reset(token)

    return call


def row_parts() -> int:
    """Count the parts that an enclosing `over_parts` has cut the rows into; 1 elsewhere."""
    return _parts.get()


def sum_over_parts(x: jax.Array) -> jax.Array:
    """Sum `x` over the parts that `row_parts` counts."""
    return x if row_parts() == 1 else jax.lax.psum(x, "parts")


_cut: ContextVar[bool] = ContextVar("cut", default=False)


def row_axes() -> tuple[str, ...]:
    """Return the axes that rows are sharded over: those of ROW_AXES, without `data` within `over_parts`, and with
    `context` for what `cut_rows` returns, within `of_cut_rows`.
    """
    axes = ROW_AXES if row_parts() == 1 else ROW_AXES[1:]
    return (*axes, "context") if _cut.get() else axes


def row_sharding(mesh: AnyMesh) -> NamedSharding:
    """Shard the first axis, rows, over `row_axes` and no other axis."""
    return NamedSharding(mesh, PartitionSpec(row_axes()))


def mesh_of_rows(x: jax.Array) -> AbstractMesh | None:
    """Return the mesh of the arrays that `x`, [rows, ...], is computed from, if its rows can be sharded over it.

    Otherwise None: where the mesh does not divide the rows, or within `jax.shard_map`.
    """
    mesh: AbstractMesh = jax.typeof(x).sharding.mesh
    if mesh.size == 1 or not set(AXES) <= set(mesh.axis_names) or set(mesh.axis_types) != {AxisType.Auto}:
        return None
    return None if x.shape[0] % row_multiple(mesh) else mesh


def with_rows_of(x: jax.Array, like: jax.Array) -> jax.Array:
    """Shard the rows of `x`, [rows, ...], over the mesh of `like`, [rows, ...]; for use inside jit.

    Otherwise the compiler follows the embedding table, which `fsdp` shards along the hidden dimension: every device
    then computes all rows, and the devices all-reduce activations instead of all-gathering parameters.
    """
    mesh = mesh_of_rows(like)
    return x if mesh is None else jax.lax.with_sharding_constraint(x, row_sharding(mesh))


def context_mesh(x: jax.Array) -> AbstractMesh | None:
    """Return the mesh of `x`, [rows, time, ...], if `context` cuts its rows: not within `of_cut_rows`."""
    mesh = None if _cut.get() else mesh_of_rows(x)
    return mesh if mesh is not None and mesh.shape["context"] > 1 else None


@contextmanager
def of_cut_rows() -> Iterator[None]:
    """Have `row_axes` and all that asks it take rows for pieces of rows, while a program is traced."""
    token = _cut.set(True)
    try:
        yield
    finally:
        _cut.reset(token)


def cut_rows(x: jax.Array, mesh: AbstractMesh) -> jax.Array:
    """Cut rows into one piece per device of `context`: [rows, time, ...] → [rows · context, time / context, ...].

    Pieces are more rows to everything that computes each token by itself, and are sharded like them: over `row_axes`
    and `context`. They are not in the order of the rows. The mesh's `context` divides time.
    """
    return _on_devices(lambda x: x, mesh, _by_time(), PartitionSpec((*row_axes(), "context")))(x)


def join_pieces(x: jax.Array, mesh: AbstractMesh) -> jax.Array:
    """Undo `cut_rows`; the result is sharded over `row_axes`, and along time over `context`."""
    return _on_devices(lambda x: x, mesh, PartitionSpec((*row_axes(), "context")), _by_time())(x)


def over_pieces(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Call function(axes, *arrays) → arrays [rows, n, ...] for arrays [rows, n, ...] of single tokens; for use inside
    jit.

    Where `context` cuts rows, the function gets pieces, each of them on one device, as more and shorter rows. axes: the
    mesh axes that the function's rows are sharded over.
    """
    mesh = context_mesh(arrays[0])
    if mesh is None:
        return function(row_axes(), *arrays)
    pieces = [cut_rows(with_room(x, mesh), mesh) for x in arrays]
    with of_cut_rows():
        made = function(row_axes(), *pieces)
    return jax.tree.map(lambda x: join_pieces(x, mesh)[:, : arrays[0].shape[1]], made)


def zigzag(time: int, size: int) -> NDArray[np.intp]:
    """Order the tokens of rows, [time], so that `cut_rows` gives device i of `size` the parts i and 2 · size - 1 - i
    of 2 · size: as queries of causal attention, they are then the same work for all devices.
    """
    parts = np.arange(time).reshape(2, size, -1)
    return np.stack([parts[0], parts[1, ::-1]], 1).reshape(-1)


def join_zigzag(x: jax.Array, mesh: AbstractMesh) -> jax.Array:
    """Undo `zigzag` and `cut_rows`: each device sends its two parts to those that have them in order."""
    size = mesh.shape["context"]
    owner = {part: min(part, 2 * size - 1 - part) for part in range(2 * size)}
    routes = [[(owner[2 * to + half], to) for to in range(size)] for half in (0, 1)]

    def local(x: jax.Array) -> jax.Array:
        parts = jnp.split(x, 2, axis=1)
        # Of devices with even numbers, the first part has an even number and the second an odd one.
        even = jax.lax.axis_index("context") % 2 == 0
        sent = jnp.where(even, parts[0], parts[1]), jnp.where(even, parts[1], parts[0])
        return jnp.concatenate(
            [jax.lax.ppermute(part, "context", route) for part, route in zip(sent, routes, strict=True)],
            axis=1,
        )

    return _on_devices(local, mesh, PartitionSpec((*row_axes(), "context")), _by_time())(x)


def take_tokens(x: jax.Array, at: jax.Array) -> jax.Array:
    """Read x[b, at[b, j]]: [rows, time, D], int32 [rows, n] → [rows, n, D].

    Where `context` cuts rows, every device gathers a row and reads its share of `at`.
    """
    mesh = context_mesh(x)
    if mesh is None:
        return jnp.take_along_axis(x, at[:, :, None], axis=1)

    def local(x: jax.Array, at: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, "context", axis=1, tiled=True)
        return jnp.take_along_axis(whole, at[:, :, None], axis=1)

    x, more = (with_room(each, mesh) for each in (x, at))
    return _on_devices(local, mesh, (_by_time(), _by_time()), _by_time())(x, more)[:, : at.shape[1]]


def with_room(x: jax.Array, mesh: AbstractMesh, parts: int = 1) -> jax.Array:
    """Append zeros along time, so that `context` · parts divides it."""
    fill = -x.shape[1] % (parts * mesh.shape["context"])
    if not fill:
        return x
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, fill)
    return jnp.pad(x, widths)


def _by_time() -> PartitionSpec:
    return PartitionSpec(row_axes(), "context")


def _on_devices(
    function: Callable[..., jax.Array], mesh: AbstractMesh, ins: Any, outs: Any
) -> Callable[..., jax.Array]:
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)


def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Look up rows of a table, [words, hidden], for tokens, int32 [rows, time], as `with_rows_of` shards them.

    Each device looks up the columns that it has of the table, for all rows of its group, which then exchange columns
    for rows. Without this, the compiler sends them over `data`, too.
    """
    mesh = mesh_of_rows(tokens)
    if mesh is None or table.shape[1] % math.prod(mesh.shape[axis] for axis in SPREAD):
        return table.at[tokens].get(mode="clip")
    data = "data" if "data" in row_axes() else None
    rows, columns = (NamedSharding(mesh, PartitionSpec(data, *axes)) for axes in ((), (None, SPREAD)))
    tokens = jax.lax.with_sharding_constraint(tokens, rows)
    return jax.lax.with_sharding_constraint(table.at[tokens].get(mode="clip"), columns)


def gathered(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Gather what `fsdp` and `expert` spread of a parameter; what `tensor` spreads stays where it is.

    Otherwise the compiler gathers where the parameter is used, and again wherever it is used in another shape.
    axes: the parameter's logical axes.
    """
    mesh: AbstractMesh = jax.typeof(x).sharding.mesh
    spread = math.prod(mesh.shape.get(axis, 1) for axis in SPREAD)
    if spread == 1 or set(mesh.axis_types) != {AxisType.Auto}:
        return x
    spec = [axis if axis == "tensor" else None for axis in param_spec(mesh, axes, x.shape)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def sum_over_tensor(x: jax.Array) -> jax.Array:
    """Sum `x` over the devices that share a layer, within `jax.shard_map` over `tensor`; elsewhere return it as is."""
    return jax.lax.psum(x, "tensor") if "tensor" in jax.sharding.get_abstract_mesh().manual_axes else x


def row_multiple(mesh: AnyMesh) -> int:
    """Return the number of devices that rows are sharded over, which divides the rows of every batch."""
    return math.prod(mesh.shape[axis] for axis in row_axes())


def rows_per_device(mesh: AnyMesh | None, rows: int) -> int:
    """Count the rows that each device computes, padding rows included; without a mesh, all of them."""
    return rows if mesh is None else -(-rows // row_multiple(mesh))


def put_rows(mesh: Mesh, batch: Any) -> Any:
    """Put host arrays [rows, ...], the same on every process, onto the mesh; each process reads only its own shard."""
    sharding = row_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda idx: x[idx]), batch)


def fetch_array(x: Any) -> np.ndarray:
    """Copy a whole array to the host, on every process."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Describe arrays of these shapes and dtypes, a tree, with the shardings of an equal tree."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )


def abstract_rows(mesh: Mesh, batch: Any) -> Any:
    """Describe the arrays that `put_rows` would return, so that programs can be compiled before there is a batch."""
    sharding = row_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
