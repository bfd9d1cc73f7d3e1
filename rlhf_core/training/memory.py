"""Estimate the memory of a stage from shapes, without computing anything or touching a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core.contracts import Forecast
from rlhf_core.errors import counted
from rlhf_core.mesh import HOST, OPTIONAL, with_shardings
from rlhf_core.models import Decoder, Definition, Model
from rlhf_core.models.config import layer_loops, repetition
from rlhf_core.models.params import join, split
from rlhf_core.optimizers import make_optimizer
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.runtime import computes_on_cpu
from rlhf_core.runtime.machine import array_bytes, device_memory, format_bytes, machine_memory, platform
from rlhf_core.state import create_state, fixed_parameters
from rlhf_core.training.starting_model import COMPUTE, definition_of

if TYPE_CHECKING:
    import optax
    from jax.sharding import AbstractMesh

    from rlhf_core.plugins.registry import Registry
    from rlhf_core.training.context import Context

SAMPLING_SHARE = 0.9
"""Of a device's memory, what training state and sampling may take together; the rest is for what shapes do not tell."""
PROCESS = 1_200_000_000
"""Bytes of a host process besides its arrays: Python, libraries, compilers and compiled programs."""
HOLES = 1.2
"""Bytes that a host's allocator holds per byte in use, since it keeps freed blocks that fit nothing: up to 1.13 where a
stage of 135 million parameters followed another in the same process."""
SCORING_WIDTHS = 12
"""Values per token that one layer's forward pass holds, in multiples of the hidden size."""


def saved_bytes(
    definition: Definition, shape: tuple[int, int], frozen: str | Sequence[str] | None = None
) -> int:
    """Count the bytes that a forward pass over rows × time tokens saves for the backward pass, parameters left out.

    Where a pattern of layers repeats, the backward pass copies what one round of it has saved.
    """
    params = definition.abstract_params()
    trained, fixed = split(params, fixed_parameters(params, frozen, definition))
    tokens = jax.ShapeDtypeStruct(shape, np.int32)

    def saved(trained: Any, fixed: Any, tokens: Any) -> Any:
        return jax.vjp(lambda p: definition.hidden(join(p, fixed), tokens, tokens, tokens), trained)[1]

    residuals = [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(saved, trained, fixed, tokens))]
    for leaf in jax.tree.leaves(params):  # already counted as parameters, of a single layer without its axis
        shapes = [leaf.shape, leaf.shape[1:]] if leaf.shape[:1] == (1,) else [leaf.shape]
        found = [(shape, leaf.dtype) for shape in shapes if (shape, leaf.dtype) in residuals]
        if found:
            residuals.remove(found[0])
    size = sum(_size(*residual) for residual in residuals)
    kinds = definition.config.kinds if isinstance(definition, Decoder) else ()
    repeats = repetition(layer_loops(kinds))[2]
    return size + (size // repeats if repeats else 0)


def state_bytes(
    model: Model, tx: optax.GradientTransformation, frozen: str | Sequence[str] | None = None
) -> dict[str, int]:
    """Count the bytes of {parameters, gradients, optimizer} that each device of the model's mesh holds.

    frozen: see `create_state`.
    """
    definition = model.definition
    shapes = with_shardings(definition.abstract_params(), definition.shardings(model.mesh))
    state = create_state(model.with_params(shapes), tx, frozen=frozen)
    return {
        "parameters": device_bytes(state.params),
        "gradients": device_bytes(state.trained().params),
        "optimizer": device_bytes(state.opt_state),
    }


def sampling_memory(
    context: Context, model: Model, rewards: Sequence[Any], others: Sequence[Model]
) -> int | None:
    """Return the bytes per device that sampling may use; None where devices do not say what they have.

    What is left by the training state, a copy of what is trained, such as a reference, the models that rewards
    read, see `scoring_bytes`, which are spread over all devices, and `others`.
    """
    memory = device_memory()
    if memory is None:
        return None
    config, mesh = context.config, context.mesh
    tx = make_optimizer(config, context.registry, 1)[0]
    held = sum(state_bytes(replace(model, mesh=mesh), tx, config.frozen_parameters).values())
    for name in (getattr(reward.function, "model", None) for reward in rewards):
        if isinstance(name, str):
            size = scoring_bytes(context.described_by(name), model.tokenizer, context.registry)
            held += (size or 0) // mesh.size
    held += sum(device_bytes(other.params) for other in others)
    return max(int(SAMPLING_SHARE * memory) - held, 0)


def scoring_bytes(model: Any, tokenizer: Any | None, registry: Registry | None) -> int | None:
    """Count the bytes of a reward model in float32 and of its forward pass over a full micro-batch.

    model: a directory, hub name or table of sizes. Returns None where nothing local describes it yet.
    """
    described = definition_of(model, "score", tokenizer, registry)
    if described is None:
        return None
    definition, _ = described
    forward = MICRO_BATCH_TOKENS * definition.hidden_size * SCORING_WIDTHS * 4
    return array_bytes(definition.abstract_params()) + forward


def memory_forecast(
    parts: Mapping[str, int], dtype: str | None = None, mesh: AbstractMesh | None = None
) -> Forecast:
    """Forecast memory in one line, with a warning where this machine computes on its CPU and has less.

    On a CPU the line also counts the process itself. It is an estimate: a process that trains several stages keeps what
    the allocator could not give back, and functions of one's own hold what shapes do not show.
    """
    on_host = mesh is None and computes_on_cpu()
    parts = process_parts(parts) if on_host else parts
    size = sum(parts.values())
    available = machine_memory() if on_host else None
    made = Forecast((memory_line(parts, dtype, mesh),), memory=size)
    if available is None or size <= available:
        return made
    warning = (
        f"memory: about {format_bytes(size)}, this machine has {format_bytes(available)}: raise "
        "gradient_accumulation_steps, lower max_sequence_length, train adapters (lora), or compute in bfloat16 on an "
        "accelerator"
    )
    return replace(made, warnings=(warning,))


def process_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """Add to the parts of a stage what else its process holds: copies made while saving, and the libraries.

    A checkpoint is written from a copy while training continues; several micro-batches hold a sum of gradients
    besides the newest gradient; the last artifact is gathered into arrays on the host.
    """
    copied = parts.get("gradients", 0) + parts.get("optimizer", 0)
    arrays = {**parts, "copies while saving": copied + parts.get("parameters", 0)}
    holes = round((HOLES - 1) * sum(arrays.values()))
    return {**arrays, "process": PROCESS + holes}


def memory_line(parts: Mapping[str, int], dtype: str | None = None, mesh: AbstractMesh | None = None) -> str:
    """Format the sum of all parts and each part in one line.

    dtype: of the computation; None: COMPUTE. mesh: the parts are per device of it; None: they are totals.
    """
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    precision = "float32" if (dtype or COMPUTE) == "float32" else f"computed in {dtype}"
    where = "in all"
    if mesh is not None:
        axes = ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1 or axis not in OPTIONAL)
        where = f"on {'each of ' * (mesh.size > 1)}{counted(mesh.size, 'devices')} ({axes})"
    return f"memory about {format_bytes(sum(parts.values()))} {where}, {precision}: {listed}"


def device_bytes(tree: Any) -> int:
    """Count the bytes of a tree of shapes, or arrays, that one device holds; a CPU also those that wait on the host."""
    return _bytes(x for x in jax.tree.leaves(tree) if platform() == "cpu" or not _waits(x))


def host_bytes(tree: Any) -> int:
    """Count the bytes of a tree of shapes, or arrays, that wait in the host's memory for one device."""
    return _bytes(filter(_waits, jax.tree.leaves(tree)))


def _waits(x: Any) -> bool:
    return bool(x.sharding.memory_kind == HOST)


def _bytes(leaves: Iterable[Any]) -> int:
    return sum(_size(x.sharding.shard_shape(x.shape), x.dtype) for x in leaves)


def _size(shape: tuple[int, ...], dtype: Any) -> int:
    return int(np.prod(shape, dtype=np.int64)) * (dtype.itemsize if hasattr(dtype, "itemsize") else 4)
