"""Estimate the memory of a stage from shapes, without computing anything or touching a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core.contracts import Forecast
from rlhf_core.errors import read_json_object
from rlhf_core.mesh import AnyMesh, rows_per_device, with_shardings
from rlhf_core.models import Decoder, Definition, Head, Model, find_family, peft
from rlhf_core.models.config import remat_policy
from rlhf_core.models.loading import complete_table, describe, untied
from rlhf_core.models.lora import linear_modules
from rlhf_core.models.params import join, split
from rlhf_core.optimizers import make_optimizer
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.runtime import computes_on_cpu
from rlhf_core.runtime.devices import planned
from rlhf_core.runtime.peak_memory import array_bytes, device_memory, format_bytes, machine_memory
from rlhf_core.state import fixed_parameters, optimizer_shardings
from rlhf_core.training.open import asked_lora

if TYPE_CHECKING:
    import optax
    from jax.sharding import AbstractMesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.models.config import Remat
    from rlhf_core.plugins.registry import Registry
    from rlhf_core.stage import Stage
    from rlhf_core.training.context import Context

SAMPLING_SHARE = 0.9
"""Of a device's memory, what training state and sampling may take together; the rest is for what shapes do not tell."""
COMPUTE = "float32"
"""The dtype in which activations and caches are counted; an accelerator's bfloat16 takes half."""
PROCESS = 1_200_000_000
"""Bytes of a host process beside its arrays: Python, libraries, compilers and compiled programs."""
HOLES = 1.2
"""Bytes that a host's allocator holds per byte in use, since it keeps freed blocks that fit nothing: up to 1.13 where a
stage of 135 million parameters followed another in the same process."""
SCORING_WIDTHS = 12
"""Values per token that one layer's forward pass holds, in multiples of the hidden size."""


class MemoryLine(str):
    """A line of a forecast on memory, with its number of bytes."""

    bytes: int

    def __new__(cls, text: str, size: int) -> MemoryLine:
        line = super().__new__(cls, text)
        line.bytes = size
        return line


def definition_of(
    model: Any,
    head: Head,
    tokenizer: Any | None,
    registry: Registry | None = None,
    *,
    dtype: str | None = None,
    remat: Remat = "auto",
) -> tuple[Definition, Mapping[str, Any]] | None:
    """Return the definition and config.json of `model`, a table of sizes or a local directory; None for others.

    dtype, remat: of the computation, see `Decoder`; without dtype, COMPUTE where the family has a choice.
    Raises InputError, as loading would, for what cannot be built.
    """
    directory = None
    if isinstance(model, Mapping):
        table = {name: value for name, value in model.items() if name != "tokenizer"}
        if tokenizer is None and "vocab_size" not in table:
            return None
        hf_config, file = complete_table(table, tokenizer, registry), "model"
    elif isinstance(model, str) and (directory := _config_directory(Path(model))) is not None:
        file = str(directory / "config.json")
        hf_config = read_json_object(file)
    else:
        return None
    family = find_family(hf_config.get("model_type"), registry, where=file)
    definition = describe(family, hf_config, head, file, dtype=dtype, remat=remat)
    # Planned devices have the family's default for their platform.
    if dtype is None and planned() is None and hasattr(definition, "dtype"):
        definition = definition.computing(dtype=COMPUTE)
    return (definition, hf_config) if directory is None else untied(definition, hf_config, directory)


def model_of_shapes(
    source: Any, head: Head, config: TrainerConfig, stage: Stage, mesh: AnyMesh, *, adapters: bool = True
) -> Model:
    """Make a model with shapes in place of its parameters, sharded over `mesh`; nothing is read but its config.json.

    adapters: whether it gets those of `config.lora`. Its definition is None where nothing local describes the model.
    """
    tokenizer = stage.inputs.get("tokenizer")
    described = definition_of(source, head, tokenizer, stage.registry, dtype=config.dtype, remat=config.remat)
    if described is None:
        absent: Any = None
        return Model(absent, {}, tokenizer, {}, None, absent)
    definition, hf_config = described
    if adapters and config.lora is not None:
        modules = linear_modules(definition.abstract_params())
        definition = definition.with_lora(asked_lora(config.lora, modules))
    params = with_shardings(definition.abstract_params(), definition.shardings(mesh))
    model_mesh: Any = mesh
    return Model(definition, params, tokenizer, hf_config, None, model_mesh)


def _config_directory(directory: Path) -> Path | None:
    """Find the directory with the config.json of a local model, or of its base model if it is an adapter."""
    if (directory / peft.CONFIG).is_file() and not (directory / "config.json").is_file():
        directory = Path(peft.base_of(directory).named)
    return directory if (directory / "config.json").is_file() else None


def training_bytes(
    definition: Definition,
    tx: optax.GradientTransformation,
    shape: tuple[int, int],
    frozen: str | Sequence[str] | None = None,
    mesh: AbstractMesh | None = None,
) -> dict[str, int]:
    """Count the bytes of {parameters, gradients, optimizer, activations}, in all or per device of `mesh`.

    shape: rows and time of a micro-batch. frozen: see `create_state`. Activations are in the definition's dtype, the
    rest in float32. Activations are what the forward pass saves for the backward pass, before the compiler merges any
    of it: an upper bound. A device holds those of its rows, whole along `tensor`; parameters that it gathers from
    other devices while it computes are not counted.
    """
    activations = saved_bytes(definition, (rows_per_device(mesh, shape[0]), shape[1]), frozen)
    return {**state_bytes(definition, tx, frozen, mesh), "activations": activations}


def saved_bytes(
    definition: Definition, shape: tuple[int, int], frozen: str | Sequence[str] | None = None
) -> int:
    """Count the bytes that a forward pass over rows × time tokens saves for the backward pass, parameters left out."""
    params = definition.abstract_params()
    trained, fixed = split(params, fixed_parameters(params, frozen, definition))
    tokens = jax.ShapeDtypeStruct(shape, np.int32)

    def saved(trained: Any, fixed: Any, tokens: Any) -> Any:
        return jax.vjp(lambda p: definition.hidden(join(p, fixed), tokens, tokens, tokens), trained)[1]

    residuals = [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(saved, trained, fixed, tokens))]
    for leaf in jax.tree.leaves(params):  # already counted as parameters
        if (leaf.shape, leaf.dtype) in residuals:
            residuals.remove((leaf.shape, leaf.dtype))
    return sum(_size(*residual) for residual in residuals)


def remat_of(definition: Definition, shape: tuple[int, int]) -> str:
    """Return what "auto" stands for on a micro-batch of rows × time tokens, else the setting."""
    if not isinstance(definition, Decoder):
        return "none"
    if definition.remat != "auto":
        return definition.remat
    tokens, itemsize = shape[0] * shape[1], definition.compute_dtype.itemsize
    return "none" if remat_policy(definition.config, "auto", tokens, itemsize) is None else "dots"


def state_bytes(
    definition: Definition,
    tx: optax.GradientTransformation,
    frozen: str | Sequence[str] | None = None,
    mesh: AnyMesh | None = None,
) -> dict[str, int]:
    """Count the bytes of {parameters, gradients, optimizer}, float32, as `training_bytes` does."""
    params = definition.abstract_params()
    fixed_paths = fixed_parameters(params, frozen, definition)
    trained = split(params, fixed_paths)[0]
    optimizer = jax.eval_shape(tx.init, trained)
    if mesh is not None:
        shardings = definition.shardings(mesh)
        placed = split(shardings, fixed_paths)[0]
        optimizer = _shard_shapes(optimizer, optimizer_shardings(optimizer, trained, placed, mesh))
        params, trained = _shard_shapes(params, shardings), _shard_shapes(trained, placed)
    return {
        "parameters": array_bytes(params),
        "gradients": array_bytes(trained),
        "optimizer": array_bytes(optimizer),
    }


def sampling_memory(
    context: Context, model: Model, rewards: Sequence[Any], others: Sequence[Model]
) -> int | None:
    """Return the bytes per device that sampling may use; None where devices do not say what they have.

    What is left beside the training state, a copy of what is trained, such as a reference, the models that rewards
    read, see `scoring_bytes`, which are spread over all devices, and `others`.
    """
    memory = device_memory()
    if memory is None:
        return None
    config, mesh, sources = context.config, context.mesh, context.stage.inputs.get("sources", {})
    tx = make_optimizer(config, context.registry, 1)[0]
    held = sum(state_bytes(model.definition, tx, config.frozen_parameters, mesh).values())
    for name in (getattr(reward.function, "model", None) for reward in rewards):
        if isinstance(name, str):
            size = scoring_bytes(sources.get(name, name), model.tokenizer, context.registry)
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

    On a CPU the line also counts the process itself, so that it bounds what the process takes.
    """
    on_host = mesh is None and computes_on_cpu()
    line = memory_line(process_parts(parts) if on_host else parts, dtype, mesh)
    available = machine_memory() if on_host else None
    if available is None or line.bytes <= available:
        return Forecast((line,))
    warning = (
        f"memory: up to {format_bytes(line.bytes)}, and this machine has {format_bytes(available)}: raise "
        "gradient_accumulation_steps, lower max_sequence_length, train adapters (lora), or compute in bfloat16 on an "
        "accelerator"
    )
    return Forecast((line,), (warning,))


def process_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """Add to the parts of a stage what its process holds besides: copies made while saving, and the libraries.

    A checkpoint is written from a copy while training goes on; several micro-batches hold a sum of gradients beside the
    newest gradient; the last artifact is gathered into arrays on the host.
    """
    copied = parts.get("gradients", 0) + parts.get("optimizer", 0)
    arrays = {**parts, "copies while saving": copied + parts.get("parameters", 0)}
    holes = round((HOLES - 1) * sum(arrays.values()))
    return {**arrays, "process": PROCESS + holes}


def memory_line(
    parts: Mapping[str, int], dtype: str | None = None, mesh: AbstractMesh | None = None
) -> MemoryLine:
    """Format the sum of all parts and each part in one line.

    dtype: of the computation; None: COMPUTE. mesh: the parts are per device of it; None: they are totals.
    """
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    precision = "float32" if (dtype or COMPUTE) == "float32" else f"computed in {dtype}"
    where = "in all"
    if mesh is not None:
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        where = f"on {f'each of {mesh.size} devices' if mesh.size > 1 else '1 device'} ({axes})"
    size = sum(parts.values())
    return MemoryLine(f"memory at most about {format_bytes(size)} {where}, {precision}: {listed}", size)


def device_bytes(tree: Any) -> int:
    """Count the bytes of a tree of shapes, or arrays, that one device holds."""
    return sum(_size(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))


def _shard_shapes(tree: Any, shardings: Any) -> Any:
    """Return the shapes of the part of `tree` that one device holds."""

    def one(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)

    return jax.tree.map(one, tree, shardings)


def _size(shape: tuple[int, ...], dtype: Any) -> int:
    return int(np.prod(shape, dtype=np.int64)) * (dtype.itemsize if hasattr(dtype, "itemsize") else 4)
