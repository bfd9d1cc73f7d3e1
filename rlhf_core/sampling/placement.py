"""The sampler's own layout of the parameters, what fits next to them, and what devices exchange per token.

Training spreads parameters so that the optimizer state fits; for a decoded token every device would have to gather
all of them. So a rollout begins by moving the weights into a layout from which nothing is sent again: groups of
devices along `tensor` share each layer (Megatron-LM, Shoeybi et al. 2019), and groups are replicas of each other.
Decoding a token then takes two sums per layer within a group, an exchange of logits, after which each device samples
for its share of the group's rows, and an exchange of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlhf_core.errors import InputError
from rlhf_core.mesh import (
    AnyMesh,
    make_mesh,
    param_shardings,
    planned_mesh,
    replicated_sharding,
    row_multiple,
    with_shardings,
)
from rlhf_core.runtime.caches import cached
from rlhf_core.runtime.machine import array_bytes, platform

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.models import Definition


SLOTS = {"cpu": 32}
"""Sequences that a device decodes together, at most. On a CPU, time grows in proportion to them."""
SLOTS_ACCELERATOR = 1024
"""The same where the device's memory is known, and may allow fewer: a step reads all weights, so that more sequences
cost little."""
ENOUGH_SLOTS = 128
"""Sequences per device above which no more devices share layers: their weights are then read for enough tokens."""
UNKNOWN_MEMORY_SLOTS = 256
"""The most per device of an accelerator whose memory is not known."""
PREFILL_WIDTHS = 16
"""Values per token that prefill holds besides the cache, in multiples of the hidden size."""
PREFILL_TOKENS = {"cpu": 0}
"""Tokens that are prefilled together; 0: all prompts of a call."""
PREFILL_TOKENS_ACCELERATOR = 16_384
"""The same: enough to keep a device busy, few enough that what prefill holds, 2 GB with a hidden size of 4,096, is
little next to the weights."""


LOGITS = 4
"""Arrays of the size of the logits, float32, that a step holds."""


class Room(NamedTuple):
    """How much is sampled together."""

    tensor: int
    """Devices that share each layer."""
    slots: int
    """Sequences that the devices of one group decode together."""
    prompts: int
    """Prompts of one call, on all devices."""
    bytes: int | None
    """Bytes per device for weights, caches and logits, from their shapes; None where memory is not known."""
    shares_prompts: bool = False
    """Whether the cache of a prompt is held once for its completions, which all have a slot then."""
    prefill_tokens: int = 0
    """Tokens that a group prefills together; 0: all prompts of a call."""

    def line(self, devices: int, what: str) -> str:
        """Say it in one line. what: the field of the prompts."""
        shared = f", {self.tensor} sharing each layer" if self.tensor > 1 else ""
        size = "" if self.bytes is None else f", {self.bytes / 1e9:.1f} GB per device"
        return (
            f"{what}: {devices // self.tensor * self.slots:,} completions are sampled in parallel on {devices} "
            f"devices{shared}, from {self.prompts:,} prompts per call{size}"
        )


def plan_room(
    definition: Definition,
    mesh: AnyMesh,
    sizes: Sequence[int],
    *,
    memory: int | None,
    prompts: int,
    num_generations: int,
    prompt_length: int,
    length: int,
) -> Room:
    """Choose the fewest devices per group, of `sizes`, that have the memory for enough sequences, and how many fit.

    Where not all prompts fit, they are dealt out to equal calls, as few as have a slot for every completion.
    memory: bytes per device for weights, caches and logits; None: unknown. prompts: wanted per call. prompt_length:
    tokens of the longest padded prompt; length: of it and a completion.
    Returns the last of `sizes`, with at least one sequence and prompt per group, where nothing fits.
    """
    shared = definition.tensor_parallel is not None and mesh.size > 1
    shares = shares_prompts(definition)
    # Otherwise the rows of one program lie on several devices, and a part of them would not.
    part = prefill_tokens() if shared or mesh.size == 1 else 0
    if memory is None:
        tensor = sizes[0]
        groups = mesh.size // tensor if shared else row_multiple(mesh)
        in_group = -(-prompts // groups)
        most = most_slots(None) * tensor
        # On a CPU slots are few because that is faster, see docs/results/benchmarks.md.
        count = in_group if platform() in SLOTS else _equal(in_group, max(most // num_generations, 1))
        slots = min(count * num_generations, most)
        return Room(tensor, slots, count * groups, None, shares and slots == count * num_generations, part)
    logits = LOGITS * 4 * definition.vocab_size
    per_ring = cache_bytes(definition, 1, length) + logits
    per_slot = cache_bytes(definition, 1, length - prompt_length) + logits if shares else per_ring
    per_prompt = cache_bytes(definition, 1, prompt_length)
    prefill = prompt_length * definition.hidden_size * PREFILL_WIDTHS * 2
    for tensor in sizes:
        groups = mesh.size // tensor if shared else row_multiple(mesh)
        in_group = -(-prompts // groups)
        weights = weight_bytes(definition, mesh, tensor) if shared else prepared_bytes(definition)
        most = most_slots(memory) * tensor
        at_once = min(in_group, max(part // prompt_length, 1)) * prefill if part else 0
        parts = cache_parts(definition, tensor)
        free = max(memory - weights, 0) * parts - at_once
        held = per_prompt if part else per_prompt + prefill
        group = held + num_generations * per_slot
        fitting = min(in_group, most // num_generations, free // group)
        whole = fitting > 0
        if whole:
            count = _equal(in_group, fitting)
            slots = count * num_generations
            caches = count * group
        else:
            count = 1
            slots = max(min(num_generations, most, (free - held) // per_ring), 1)
            caches = held + slots * per_ring
        size = weights + (at_once + caches) // parts
        room = Room(tensor, slots, count * groups, size, shares and whole, part)
        enough = min(in_group * num_generations // tensor, ENOUGH_SLOTS) * tensor
        if size <= memory and slots >= enough:
            break
    return room


def plan_conversations(
    definition: Definition,
    mesh: AnyMesh,
    sizes: Sequence[int],
    *,
    memory: int | None,
    conversations: int,
    length: int,
) -> Room:
    """Choose as `plan_room` does for conversations, each with its own cache of `length` tokens.

    memory: bytes per device for weights, caches and logits; None: unknown. conversations: the usual number of a call.
    `Room.prompts` is the number of conversations that have a slot at a time.
    """
    shared = definition.tensor_parallel is not None and mesh.size > 1
    # What is fed together is computed in addition to the caches that it is written to.
    per_slot = cache_bytes(definition, 1, length) * 5 // 4 + LOGITS * 4 * definition.vocab_size
    for tensor in sizes:
        groups = mesh.size // tensor
        in_group = -(-conversations // groups)
        most = most_slots(memory) * tensor
        if memory is None:
            slots = min(in_group, most)
            return Room(tensor, slots, slots * groups, None)
        weights = weight_bytes(definition, mesh, tensor) if shared else prepared_bytes(definition)
        parts = cache_parts(definition, tensor)
        free = max(memory - weights, 0) * parts
        slots = max(min(in_group, most, free // per_slot), 1)
        size = weights + slots * per_slot // parts
        room = Room(tensor, slots, slots * groups, size)
        if size <= memory and slots >= min(in_group // tensor, ENOUGH_SLOTS) * tensor:
            break
    return room


def cache_parts(definition: Definition, tensor: int) -> int:
    """Return how many parts `tensor` devices that share layers divide their caches into."""
    parallel = definition.tensor_parallel
    return 1 if parallel is not None and not parallel.shares_caches else tensor


def _equal(count: int, most: int) -> int:
    """Return the size of as few equal parts of `count` as have at most `most`."""
    return -(-count // -(-count // most))


def shares_prompts(definition: Definition) -> bool:
    """Whether completions of a model share their prompt's cache where all of them have a slot."""
    return definition.has("decode_groups")


def prefill_tokens() -> int:
    """Return how many tokens a group of devices prefills together; 0: all of a call."""
    return PREFILL_TOKENS.get(platform(), PREFILL_TOKENS_ACCELERATOR)


def most_slots(memory: int | None) -> int:
    """Return the most sequences that a device decodes together, if it has the memory; memory None: unknown."""
    return SLOTS.get(platform(), UNKNOWN_MEMORY_SLOTS) if memory is None else SLOTS_ACCELERATOR


def weight_bytes(definition: Definition, mesh: AnyMesh, tensor: int) -> int:
    """Count the bytes per device of the parameters in the sampler's layout."""
    planned = planned_mesh(mesh.size, fsdp=1, tensor=tensor)
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract_weights(definition, planned))
    )


def prepared_bytes(definition: Definition) -> int:
    """Count the bytes of the parameters as the program on one device lays them out."""
    return array_bytes(jax.eval_shape(definition.prepare, definition.abstract_params()))


def cache_bytes(definition: Definition, sequences: int, length: int) -> int:
    """Count the bytes of the KV cache of `sequences` sequences of `length` tokens, in the definition's dtype."""
    tokens = jax.ShapeDtypeStruct((1, 1), np.int32)

    def cache(params: Any, tokens: Any) -> Any:
        return definition.ring(definition.prefill(params, tokens, tokens, tokens)[1], length, 0)

    made = jax.eval_shape(cache, definition.abstract_params(), tokens)
    return sequences * array_bytes(made)


def sampling_mesh(definition: Definition, mesh: Mesh, tensor: int) -> Mesh | None:
    """Make the mesh of the sampler over the devices of `mesh`: `tensor` of them share layers, next to each other.

    Returns None where the parameters stay as they are trained: on one device, and for families without
    `tensor_parallel`.
    """
    if mesh.size == 1 or definition.tensor_parallel is None:
        return None
    return make_mesh(fsdp=1, tensor=tensor, devices=mesh.devices.reshape(-1).tolist())


def allowed_sizes(definition: Definition, mesh: Mesh, tensor: int | None) -> list[int]:
    """List the sizes that `tensor` may have. Raises InputError for a size asked for that is not among them."""
    sizes = tensor_sizes(definition, mesh)
    if tensor is not None and tensor not in sizes:
        raise InputError(
            f"sampling.mesh.tensor: {tensor} does not fit; with {mesh.size} devices, {linked_devices(mesh)} of "
            f"them linked, the layers of this model can be shared by {', '.join(map(str, sizes))}"
        )
    return sizes if tensor is None else [tensor]


def tensor_sizes(definition: Definition, mesh: Mesh) -> list[int]:
    """List the sizes that `tensor` can have, ascending; devices that share layers are linked."""
    parallel = definition.tensor_parallel
    most = 1 if parallel is None else parallel.divides
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


@cached
def _prepared(definition: Definition, mesh: AnyMesh, shared: bool) -> tuple[Any, Any]:
    """Return (the function from parameters as they are trained to the sampler's, shapes of its result with shardings).

    shared: whether devices share layers; otherwise the mesh has one device, and `Definition.prepare` is the function.
    """
    parallel = definition.tensor_parallel if shared else None
    prepare = definition.prepare if parallel is None else parallel.prepare
    abstract = jax.eval_shape(prepare, definition.abstract_params())
    if parallel is None:
        placed = jax.tree.map(lambda _: replicated_sharding(mesh), abstract)
    else:
        placed = param_shardings(mesh, parallel.axes, abstract)
    return prepare, with_shardings(abstract, placed)


def abstract_weights(definition: Definition, mesh: AnyMesh, *, shared: bool = True) -> Any:
    """Describe the parameters that `move_weights` returns."""
    return _prepared(definition, mesh, shared)[1]


def param_specs(definition: Definition, mesh: AnyMesh) -> Any:
    return jax.tree.map(lambda x: x.sharding.spec, abstract_weights(definition, mesh))


@cached
def move_weights(definition: Definition, mesh: Mesh, shared: bool = True) -> Any:
    """Return the jitted function from parameters as they are trained to the sampler's layout on `mesh`."""
    prepare, abstract = _prepared(definition, mesh, shared)
    return jax.jit(prepare, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))


def replicated(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """Put an array that is the same on every process onto every device."""
    return jax.make_array_from_callback(x.shape, replicated_sharding(mesh), lambda index: x[index])


class Peers(NamedTuple):
    """The devices that share layers, within `jax.shard_map`: each holds a part of the vocabulary's columns, and samples
    for a part of the rows.
    """

    size: int

    def own_rows(self, tree: Any) -> Any:
        """Return this device's share of the rows of arrays [B, …]."""
        if self.size == 1:
            return tree

        def one(x: jax.Array) -> jax.Array:
            whole = self._padded(x)
            size = len(whole) // self.size
            return lax.dynamic_slice_in_dim(whole, lax.axis_index("tensor") * size, size, axis=0)

        return jax.tree.map(one, tree)

    def own_columns(self, kernel: jax.Array, columns: int) -> jax.Array:
        """Return this device's columns of a kernel [D, columns], if it has all of them and they can be shared."""
        if self.size == 1 or kernel.shape[1] < columns or columns % self.size:
            return kernel
        size = columns // self.size
        return lax.dynamic_slice_in_dim(kernel, lax.axis_index("tensor") * size, size, axis=1)

    def exchange(self, logits: jax.Array) -> jax.Array:
        """Exchange this device's columns of all rows, [B, V / size], for all columns of its rows, [B / size, V]."""
        return lax.all_to_all(self._padded(logits), "tensor", split_axis=0, concat_axis=1, tiled=True)

    def join(self, tokens: jax.Array, logps: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """Collect int32 and float32 [B / size, …] of every device: [B, …], of which the first `rows` are rows."""
        if self.size == 1:
            return tokens, logps
        words = jnp.stack([tokens, lax.bitcast_convert_type(logps, jnp.int32)])
        words = lax.all_gather(words, "tensor", axis=1, tiled=True)
        return words[0, :rows], lax.bitcast_convert_type(words[1, :rows], jnp.float32)

    def _padded(self, x: jax.Array) -> jax.Array:
        """Add rows to arrays [B, …] until every device has as many."""
        return jnp.pad(x, [(0, -len(x) % self.size), *[(0, 0)] * (x.ndim - 1)])
