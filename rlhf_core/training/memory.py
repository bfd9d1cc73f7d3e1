"""How much memory a stage will need, told from shapes alone: nothing is computed and no device is touched."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core.contracts import Forecast
from rlhf_core.errors import read_json_object
from rlhf_core.mesh import rows_per_device
from rlhf_core.models import Definition, Head, find_family, peft
from rlhf_core.models.loading import complete_table, describe
from rlhf_core.models.params import join, split
from rlhf_core.packing.layout import MICRO_BATCH_TOKENS
from rlhf_core.runtime import computes_on_cpu
from rlhf_core.runtime.peak_memory import format_bytes, machine_memory
from rlhf_core.state import fixed_parameters, optimizer_shardings

if TYPE_CHECKING:
    import optax
    from jax.sharding import AbstractMesh

    from rlhf_core.models.config import Remat
    from rlhf_core.plugins.registry import Registry

COMPUTE = "float32"
"""What activations and caches are counted in; an accelerator's bfloat16 takes half."""
PROCESS = 1_200_000_000
"""Bytes of a process on the host beside its arrays: Python, libraries, compilers and what they compiled."""
HOLES = 1.15
"""What a host's allocator holds for each byte in use: freed blocks that fit nothing stay."""
SCORING_WIDTHS = 12
"""Widths of the hidden states that one layer's forward pass holds for each token."""


class MemoryLine(str):
    """A forecast's line on memory, with the bytes that it names."""

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
    """What `model`, a table of sizes or a local directory, describes, and its config.json.

    dtype, remat: of the computation, see `DecoderConfig`; no dtype: COMPUTE, where the family can be told.

    None where nothing local says it.

    Raises InputError, as loading would, for what cannot be built.
    """
    if isinstance(model, Mapping):
        table = {name: value for name, value in model.items() if name != "tokenizer"}
        if tokenizer is None and "vocab_size" not in table:
            return None
        hf_config, file = complete_table(table, tokenizer, registry), "model"
    elif isinstance(model, str) and (directory := _described(Path(model))) is not None:
        file = str(directory / "config.json")
        hf_config = read_json_object(file)
    else:
        return None
    family = find_family(hf_config.get("model_type"), registry)
    if dtype is None and "dtype" in inspect.signature(family.parse).parameters:
        dtype = COMPUTE
    return describe(family, hf_config, head, file, dtype=dtype, remat=remat), hf_config


def _described(directory: Path) -> Path | None:
    """The directory with the config.json of a local model, which for an adapter is that of its base model."""
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
    """Bytes of {parameters, gradients, optimizer, activations}, in all or on each device of `mesh`; activations in the
    definition's dtype, the rest float32.

    shape: rows and time of a micro-batch. frozen: as `create_state` takes it. Activations are what the backward pass
    keeps of the forward, before the compiler merges any of it: an upper estimate. A device keeps those of its rows,
    whole along `tensor`; what it gathers of other devices' parameters while it computes is not counted.
    """
    params = definition.abstract_params()
    fixed_paths = fixed_parameters(params, frozen, definition)
    trained, fixed = split(params, fixed_paths)
    tokens = jax.ShapeDtypeStruct((rows_per_device(mesh, shape[0]), shape[1]), np.int32)

    def kept(trained: Any, fixed: Any, tokens: Any) -> Any:
        return jax.vjp(lambda p: definition.hidden(join(p, fixed), tokens, tokens, tokens), trained)[1]

    residuals = [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(kept, trained, fixed, tokens))]
    for leaf in jax.tree.leaves(params):  # parameters that the backward pass reads are there anyway
        if (leaf.shape, leaf.dtype) in residuals:
            residuals.remove((leaf.shape, leaf.dtype))
    optimizer = jax.eval_shape(tx.init, trained)
    activations = sum(_size(*each) for each in residuals)
    if mesh is not None:
        shardings = definition.shardings(mesh)
        placed = split(shardings, fixed_paths)[0]
        optimizer = _part(optimizer, optimizer_shardings(optimizer, trained, placed, mesh))
        params, trained = _part(params, shardings), _part(trained, placed)
    return {
        "parameters": _bytes(params),
        "gradients": _bytes(trained),
        "optimizer": _bytes(optimizer),
        "activations": activations,
    }


def cache_bytes(definition: Definition, sequences: int, length: int) -> int:
    """Bytes of the key/value cache of `sequences` sequences of `length` tokens, in the definition's dtype."""
    tokens = jax.ShapeDtypeStruct((1, 1), np.int32)

    def cache(params: Any, tokens: Any) -> Any:
        return definition.ring(definition.prefill(params, tokens, tokens, tokens)[1], length, 0)

    return sequences * _bytes(jax.eval_shape(cache, definition.abstract_params(), tokens))


def scoring_bytes(model: str, tokenizer: Any | None, registry: Registry | None) -> int | None:
    """Bytes of a reward model in float32 and of the forward pass of a full micro-batch; None where it is not there yet.

    model: a directory or hub name.
    """
    found = definition_of(model, "score", tokenizer, registry)
    if found is None:
        return None
    definition, _ = found
    forward = MICRO_BATCH_TOKENS * definition.hidden_size * SCORING_WIDTHS * 4
    return _bytes(definition.abstract_params()) + forward


def memory_forecast(
    parts: Mapping[str, int], dtype: str | None = None, mesh: AbstractMesh | None = None
) -> Forecast:
    """Make `memory_line`, and a warning where this machine computes on its CPU and has less.

    On a CPU the parts of the process are added to those of the arrays, which then are a bound for the process.
    """
    on_host = mesh is None and computes_on_cpu()
    line = memory_line(process_parts(parts) if on_host else parts, dtype, mesh)
    there = machine_memory() if on_host else None
    if there is None or line.bytes <= there:
        return Forecast((line,))
    warning = (
        f"memory: up to {format_bytes(line.bytes)}, and this machine has {format_bytes(there)}: "
        "raise gradient_accumulation_steps, lower max_sequence_length, "
        "train adapters (lora), or compute in bfloat16 on an accelerator"
    )
    return Forecast((line,), (warning,))


def process_parts(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts of a stage as the process that runs it holds them, with what saving copies and the libraries take.

    A checkpoint is written from a copy, since training goes on meanwhile; micro-batches of one update hold the sum of
    the gradients beside the newest one, and the last artifact is gathered into arrays on the host.
    """
    copied = parts.get("gradients", 0) + parts.get("optimizer", 0)
    arrays = {**parts, "copies while saving": copied + parts.get("parameters", 0)}
    holes = round((HOLES - 1) * sum(arrays.values()))
    return {**arrays, "process": PROCESS + holes}


def memory_line(
    parts: Mapping[str, int], dtype: str | None = None, mesh: AbstractMesh | None = None
) -> MemoryLine:
    """One line: the sum of all parts, and each. dtype: of the computation; None: COMPUTE. mesh: of the devices each of
    which has these parts; None: they are in all."""
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    told = "float32" if (dtype or COMPUTE) == "float32" else f"computed in {dtype}"
    where = "in all"
    if mesh is not None:
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        where = f"on {f'each of {mesh.size} devices' if mesh.size > 1 else '1 device'} ({axes})"
    size = sum(parts.values())
    return MemoryLine(f"memory at most about {format_bytes(size)} {where}, {told}: {listed}", size)


def _part(tree: Any, shardings: Any) -> Any:
    """The shapes of what one device holds of `tree`."""

    def one(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)

    return jax.tree.map(one, tree, shardings)


def _bytes(tree: Any) -> int:
    return sum(_size(x.shape, x.dtype) for x in jax.tree.leaves(tree))


def _size(shape: tuple[int, ...], dtype: Any) -> int:
    return int(np.prod(shape, dtype=np.int64)) * (dtype.itemsize if hasattr(dtype, "itemsize") else 4)
