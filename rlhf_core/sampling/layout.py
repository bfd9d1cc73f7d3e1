"""Where the sampler's parameters lie: a mesh of its own, whose devices share layers, and what they exchange per token.

Training spreads parameters so that their optimizer state fits; a decoded token would then have every device gather every
layer. So a rollout begins by bringing the weights into a layout in which none is sent again: the devices along `tensor`
share each layer, all rows along `data` have replicas (Megatron-LM, Shoeybi et al. 2019). A token costs two sums per layer,
an exchange of logits, after which each device samples for its share of the rows, and one of the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_core.errors import InputError
from rlhf_core.mesh import AnyMesh, make_mesh, param_shardings

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.contracts import ModelDefinition


def sampling_mesh(definition: ModelDefinition, mesh: Mesh, tensor: int | None) -> Mesh | None:
    """Make the mesh of the sampler over the devices of `mesh`: `tensor` of them share layers, next to each other.

    Returns None where the parameters stay as they are trained: on one device, and for families without
    `tensor_parallel`. Raises InputError where the devices of a machine, or the layers, cannot be shared so.
    """
    parallel = definition.family.tensor_parallel
    if mesh.size == 1 or parallel is None:
        if (tensor or 1) > 1:
            reason = "there is one device" if mesh.size == 1 else "this model's family cannot share its layers"
            raise InputError(f"sampling.mesh.tensor: {tensor} does not fit, since {reason}; leave it out")
        return None
    sizes = tensor_sizes(definition, mesh)
    tensor = 1 if tensor is None else tensor
    if tensor not in sizes:
        raise InputError(
            f"sampling.mesh.tensor: {tensor} does not fit; with {mesh.size} devices, {linked_devices(mesh)} of "
            f"them linked, the layers of this model can be shared by {', '.join(map(str, sizes))}"
        )
    return make_mesh(fsdp=1, tensor=tensor, devices=mesh.devices.reshape(-1).tolist())


def tensor_sizes(definition: ModelDefinition, mesh: Mesh) -> list[int]:
    """List the sizes that `tensor` can have, ascending; devices that share layers are linked."""
    parallel = definition.family.tensor_parallel
    most = 1 if parallel is None else parallel.divides(definition.config)
    linked = linked_devices(mesh)
    return [n for n in range(1, linked + 1) if linked % n == 0 and most % n == 0]


def linked_devices(mesh: Mesh) -> int:
    """Count the devices that follow each other in `mesh` within one machine, or one slice of TPUs; 1 where the groups
    differ in size.
    """
    devices = mesh.devices.reshape(-1)
    groups = [getattr(d, "slice_index", 0) if d.platform == "tpu" else d.process_index for d in devices]
    count = groups.count(groups[0])
    runs = [groups[i : i + count] for i in range(0, len(groups), count)]
    return count if all(len(run) == count and len(set(run)) == 1 for run in runs) else 1


@functools.cache
def shardings(definition: ModelDefinition, mesh: AnyMesh) -> Any:
    """Choose a NamedSharding for every parameter in the sampler's layout."""
    parallel = definition.family.tensor_parallel
    assert parallel is not None
    prepare = functools.partial(parallel.prepare, definition.config)
    abstract = jax.eval_shape(prepare, definition.family.abstract(definition.config))
    return param_shardings(mesh, parallel.axes(definition.config), abstract)


def abstract_weights(definition: ModelDefinition, mesh: AnyMesh) -> Any:
    """Describe the parameters that `bring` returns."""
    parallel = definition.family.tensor_parallel
    assert parallel is not None
    prepare = functools.partial(parallel.prepare, definition.config)
    abstract = jax.eval_shape(prepare, definition.family.abstract(definition.config))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract,
        shardings(definition, mesh),
    )


def param_specs(definition: ModelDefinition, mesh: AnyMesh) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, shardings(definition, mesh))


@functools.cache
def bring(definition: ModelDefinition, mesh: Mesh) -> Any:
    """Compile-on-call: parameters as they are trained → the sampler's layout on `mesh`."""
    parallel = definition.family.tensor_parallel
    assert parallel is not None
    prepare = functools.partial(parallel.prepare, definition.config)
    return jax.jit(prepare, out_shardings=shardings(definition, mesh))


class Peers(NamedTuple):
    """The devices that share layers, within `jax.shard_map`: each holds a part of the vocabulary's columns, and samples
    for a part of the rows.
    """

    count: int

    def own_rows(self, tree: Any) -> Any:
        """Return this device's share of the rows of arrays [B, …]."""
        if self.count == 1:
            return tree

        def one(x: jax.Array) -> jax.Array:
            size = x.shape[0] // self.count
            return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, axis=0)

        return jax.tree.map(one, tree)

    def own_columns(self, kernel: jax.Array, columns: int) -> jax.Array:
        """Return this device's columns of a kernel [D, columns], if it has all of them and they can be shared."""
        if self.count == 1 or kernel.shape[1] < columns or columns % self.count:
            return kernel
        size = columns // self.count
        return lax.dynamic_slice_in_dim(kernel, lax.axis_index("tensor") * size, size, axis=1)

    def exchange(self, logits: jax.Array) -> jax.Array:
        """Exchange this device's columns of all rows, [B, V / count], for all columns of its rows, [B / count, V]."""
        return lax.all_to_all(logits, "tensor", split_axis=0, concat_axis=1, tiled=True)

    def join(self, tokens: jax.Array, logps: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Collect int32 and float32 [B / count] of every device: [B]."""
        if self.count == 1:
            return tokens, logps
        words = jnp.stack([tokens, lax.bitcast_convert_type(logps, jnp.int32)])
        words = lax.all_gather(words, "tensor", axis=1, tiled=True)
        return words[0], lax.bitcast_convert_type(words[1], jnp.float32)


def rounded_slots(slots: int, tensor: int) -> int:
    """Round up to what the devices that share layers can divide."""
    return -(-slots // tensor) * tensor


__all__: Sequence[str] = ()
