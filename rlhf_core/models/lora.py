"""Low-rank adapters of a model's linear layers (LoRA, Hu et al. 2021)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rlhf_core.models.quantized as quantized
from rlhf_core.errors import InputError, suggest
from rlhf_core.models.params import Path, absent_lines, has_number, numbered, paths, search

GROUP = "adapter"
"""The key of a module's adapter: {"lora_a", "lora_b"} and, with dropout, "lora_key"."""
BUFFERS = ("layer_scalar",)
"""The names of parameters that no update changes."""
ROUTER = "gate"
"""The name of experts' routers, which are never adapted."""


@dataclass(frozen=True)
class Lora:
    """y = x · kernel + scale · (dropout(x) · A) · B, with A [in, rank] and B [rank, out]; B starts at zero.

    scale: alpha / rank, or alpha / sqrt(rank) with use_rslora (Kalajdzievski 2023). dropout: the probability that an
    element of x is zero on its way into A, while training.
    targets: dotted paths of the adapted modules within a layer, such as "self_attn.q_proj".
    layers: of targets that are adapted in some layers only, (target, indices of these in its stack). A and B of the
        others are zero, and neither trained nor saved.
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]
    layers: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def adapts(self, target: str, layer: int) -> bool:
        """Whether the layer of this index in the target's stack has an adapter."""
        return layer in dict(self.layers).get(target, (layer,))

    @property
    def scale(self) -> float:
        """The factor of A · B, unitless."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def linear_modules(params: Mapping[str, Any]) -> tuple[str, ...]:
    """List dotted paths, within `layers`, of the modules that can be adapted: those with a kernel [layers, in, out]."""
    kernels = [path for path, leaf in paths(params) if path[0] == "layers" and path[-1] == "kernel"]
    sizes = {path: leaf.shape for path, leaf in paths(params)}
    return tuple(".".join(path[1:-1]) for path in kernels if len(sizes[path]) == 3 and path[-2] != ROUTER)


class Targets(NamedTuple):
    """What `resolve` chooses. absent: lines about alternatives that name nothing."""

    modules: tuple[str, ...]
    layers: tuple[tuple[str, tuple[int, ...]], ...]
    absent: list[str]


def module_paths(model: Any) -> dict[str, list[tuple[str, str]]]:
    """Return {module that can be adapted: by layer, its path with the layer's number and its name in the files}.

    model: the definition.
    """
    shapes = model.quantized_as(None).abstract_params()
    leaves = dict(paths(shapes))
    stored = model.module_names()
    found = {}
    for module in linear_modules(shapes):
        path = ("layers", *module.split("."), "kernel")
        own = [name.removesuffix(".kernel") for name, _ in numbered(model, path, leaves[path])]
        found[module] = list(zip(own, stored[module], strict=True))
    return found


def resolve(targets: str | Sequence[str], names: Mapping[str, Sequence[tuple[str, str]]]) -> Targets:
    """Choose the modules that `targets` names: "all-linear", or names and regular expressions of whole dotted paths.

    A path is that of a module within a layer, "self_attn.q_proj", or begins with `layers` and the layer's number,
    "layers.0.self_attn.q_proj", or is the module's name in the files. An expression without a number may also mean
    "layers.self_attn.q_proj", the module in all layers.

    names: `module_paths`. Raises InputError for a target that names no module.
    """
    if targets == "all-linear":
        return Targets(tuple(names), (), [])
    chosen: set[tuple[str, int]] = set()
    absent = []
    for target in [targets] if isinstance(targets, str) else targets:
        try:
            found, lost = search(target, partial(_named, names))
        except re.error as error:
            raise InputError(f"lora.targets: '{target}' is not a regular expression: {error}") from None
        if not found:
            last = [module.rpartition(".")[2] for module in names]
            raise InputError(
                f"lora.targets: '{target}' names no linear layer.{suggest(target, last)} "
                f"The model has {', '.join(last)}"
            )
        absent += absent_lines([(part, target) for part in lost], "linear layer")
        chosen |= found
    layers = {
        module: tuple(i for i in range(len(each)) if (module, i) in chosen) for module, each in names.items()
    }
    modules = tuple(module for module in names if layers[module])
    some = tuple((module, layers[module]) for module in modules if len(layers[module]) < len(names[module]))
    return Targets(modules, some, absent)


def _named(names: Mapping[str, Sequence[tuple[str, str]]], target: str) -> set[tuple[str, int]]:
    """Find the modules that a target names, {(module, index of its layer)}: by name in all layers, else in some."""
    expression = re.compile(target)
    everywhere = {m for m in names if f".{m}".endswith(f".{target}") or expression.fullmatch(m)}
    if not has_number(target):
        everywhere |= {m for m in names if expression.fullmatch(f"layers.{m}")}
    if everywhere:
        return {(module, i) for module in everywhere for i in range(len(names[module]))}
    return {
        (module, i)
        for module, each in names.items()
        for i, both in enumerate(each)
        if any(f".{name}".endswith(f".{target}") or expression.fullmatch(name) for name in both)
    }


def layers_without_adapters(model: Any) -> dict[Path, tuple[int, ...]]:
    """Find the layers of adapters' stacks that have none, {path: indices}. model: the definition, or None."""
    lora: Lora | None = getattr(model, "lora", None)
    if lora is None or not lora.layers:
        return {}
    shapes = dict(paths(model.abstract_params()))
    found = {}
    for target, _ in lora.layers:
        for name in ("lora_a", "lora_b"):
            path = ("layers", *target.split("."), GROUP, name)
            found[path] = tuple(i for i in range(shapes[path].shape[0]) if not lora.adapts(target, i))
    return found


def with_noise(params: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
    """Return `params` with a dropout key, drawn from `key`, for every adapter that has dropout."""
    noisy = dict(params)
    for number, (name, value) in enumerate(sorted(params.items())):
        if isinstance(value, Mapping):
            noisy[name] = with_noise(value, jax.random.fold_in(key, number))
        elif name == "lora_key":
            noisy[name] = jax.random.bits(key, value.shape, value.dtype)
    return noisy


def has_noise(params: Mapping[str, Any]) -> bool:
    return any(path[-1] == "lora_key" for path, _ in paths(params))


def merge(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Merge adapters into the kernels: kernel + scale · A · B, float32; quantized kernels are dequantized."""
    merged: dict[str, Any] = {
        name: merge(value, scale) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name not in (GROUP, quantized.GROUP)
    }
    if quantized.GROUP in params:
        merged["kernel"] = quantized.dequantize(params[quantized.GROUP], jnp.float32)
    if GROUP in params:
        merged["kernel"] = merged["kernel"] + scale * product(params[GROUP])
    return merged


def product(adapter: Mapping[str, Any]) -> jax.Array:
    """Compute A · B, float32 [..., in, out]."""
    return jnp.matmul(adapter["lora_a"], adapter["lora_b"], precision="highest")


def has_adapters(params: Mapping[str, Any]) -> bool:
    """Whether the parameters of one model, or of several at any depth, include adapters."""
    return any(GROUP in path for path, _ in paths(params))


def untrained(params: Mapping[str, Any], model: frozenset[Path] | None = None) -> frozenset[Path]:
    """Find the parameters that are never trained: buffers, and with adapters the rest of their model, except its reward
    head.

    params: of one model, or of several at any depth; a model without adapters is trained as a whole. model: the paths
    of the model with the adapters; other parameters, such as an additional head, are trained. Raises InputError for
    a nested model with adapters that has other paths: they could belong to it or not.
    """
    every = [path for path, _ in paths(params)]
    fixed = {path for path in every if path[-1] in BUFFERS}
    roots = {path[: _layers_at(path)] for path in every if GROUP in path}
    for path in every:
        above = [root for root in roots if path[: len(root)] == root]
        if not above:
            continue
        root = max(above, key=len)
        inner = path[len(root) :]
        if inner[0] == "score":
            continue
        if GROUP in inner:
            if path[-1] == "lora_key":
                fixed.add(path)
        elif model is None or inner in model:
            fixed.add(path)
        elif root:
            raise InputError(
                f"'{'.'.join(path)}' is not a parameter of the model with the adapters under '{'.'.join(root)}': give "
                "several models by name, create_state({'policy': policy, 'critic': critic}, tx)"
            )
    return frozenset(fixed)


def _layers_at(path: Path) -> int:
    """Find where a model with adapters begins in a path: at the `layers` that contain the adapter."""
    before = path[: path.index(GROUP)]
    return max((i for i, name in enumerate(before) if name == "layers"), default=0)
