"""What a family of language models registers: how a config.json becomes a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rlhf_core.models import Definition

Head = Literal["lm", "score"]


@dataclass(frozen=True)
class ModelFamily:
    """A family of language models: from a Hugging Face config.json to a `rlhf_core.models.Definition`.

    name: the `model_type` values of config.json that it reads, such as ("llama", "qwen2").
    define: (config.json, head) → the model without its parameters; raises InputError naming each field that the family
    cannot honour. The model's methods are the family's functions: shapes and fresh parameters, forward pass, prefill
    and decode, loading and saving. `rlhf_core.models.Definition` lists them.
    """

    name: tuple[str, ...]
    define: Callable[[Mapping[str, Any], Head], Definition]


@dataclass(frozen=True)
class TensorParallel:
    """How a model samples with every layer shared by the devices along the mesh axis `tensor`.

    Within `jax.shard_map` its `prefill`, `decode`, `extend` and `unembedding` then get each device's part of the
    parameters, and sum over the axis where a layer needs it (`rlhf_core.mesh.sum_over_tensor`). The tokens, positions
    and hidden states are the same on all devices of the axis.
    divides: the number that the axis' size must divide; 1: no layer can be shared.
    prepare: as `Definition.prepare`, in a layout whose parts are those of the devices. axes: the logical axes of its
    result. shares_caches: whether each device has a part of the caches; else all have the whole of them.
    """

    divides: int
    prepare: Callable[[Any], Any]
    axes: dict[str, Any]
    shares_caches: bool = True
