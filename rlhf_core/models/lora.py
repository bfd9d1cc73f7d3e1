"""Low-rank adapters beside a model's linear layers (LoRA, Hu et al. 2021)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_core.errors import InputError, near
from rlhf_core.partition import Path, paths

GROUP = "adapter"
"""Where a module keeps its adapter: {"lora_a", "lora_b"} and, with dropout, "lora_key"."""
ROUTER = "gate"
"""The name of experts' routers, which stay as they are."""


@dataclass(frozen=True)
class Lora:
    """y = x · kernel + scale · (dropout(x) · A) · B, with A [in, rank] and B [rank, out]; B starts at zero.

    scale: alpha / rank, or alpha / sqrt(rank) with use_rslora (Kalajdzievski 2023). dropout: the probability that an
    element of x is zero on its way into A, while training.
    targets: dotted paths of the adapted modules within a layer, such as "self_attn.q_proj".
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def linear_modules(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Dotted paths, within a layer, of the modules that can be adapted: those with a kernel [layers, in, out]."""
    found = [path for path, leaf in paths(params) if path[0] == "layers" and path[-1] == "kernel"]
    sizes = {path: leaf.shape for path, leaf in paths(params)}
    return tuple(".".join(path[1:-1]) for path in found if len(sizes[path]) == 3 and path[-2] != ROUTER)


def resolve(targets: str | Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
    """The modules that `targets` asks for: "all-linear", or names and regular expressions of whole dotted paths.

    Raises InputError for one that names no module.
    """
    if targets == "all-linear":
        return tuple(modules)
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        try:
            hits = {m for m in modules if target in (m, m.rpartition(".")[2]) or re.fullmatch(target, m)}
        except re.error as error:
            raise InputError(f"lora.targets: {target!r} is not a regular expression: {error}") from None
        if not hits:
            names = [module.rpartition(".")[2] for module in modules]
            raise InputError(
                f"lora.targets: {target!r} names no linear layer.{near(target, names)} "
                f"The model has {', '.join(names)}"
            )
        chosen |= hits
    return tuple(module for module in modules if module in chosen)


def with_noise(params: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
    """`params` with the dropout of every adapter drawn from `key`; without dropout, as they are."""
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
    """Parameters of a model without adapters that computes the same: kernel + scale · A · B, float32."""
    merged = {
        name: merge(value, scale) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name != GROUP
    }
    if GROUP in params:
        merged["kernel"] = params["kernel"] + scale * product(params[GROUP])
    return merged


def product(adapter: Mapping[str, Any]) -> jax.Array:
    """A · B, float32 [..., in, out]."""
    return jnp.matmul(adapter["lora_a"], adapter["lora_b"], precision="highest")


def untrained(params: Mapping[str, Any]) -> frozenset[Path]:
    """Paths of what is not trained where adapters are: all but them and the reward head. Without adapters: none."""
    every = [path for path, _ in paths(params)]
    trained = {path for path in every if GROUP in path and path[-1] != "lora_key"}
    return (
        frozenset(path for path in every if path not in trained and path[0] != "score")
        if trained
        else frozenset()
    )
