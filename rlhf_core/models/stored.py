"""Parameters on their way into files: which of them a model saves, and how saving rounds them."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core.errors import InputError
from rlhf_core.models.params import paths

if TYPE_CHECKING:
    from rlhf_core.models.definition import Definition


def rounded(params: Any, dtype: str) -> Any:
    """Round float32 parameters to `dtype` and back, each where it is; for float32 they are returned as they are."""
    if dtype == "float32":
        return params
    leaves, tree = jax.tree.flatten(params)
    shardings = tuple(leaf.sharding for leaf in leaves)
    # Two programs: within one, XLA may leave both conversions out.
    return _cast(tree, shardings, "float32")(_cast(tree, shardings, dtype)(params))


@functools.cache
def _cast(tree: Any, shardings: tuple[Any, ...], dtype: str) -> Any:
    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)

    return jax.jit(cast, out_shardings=tree.unflatten(shardings))


def require_own_parameters(definition: Definition, params: Any) -> None:
    """Raise InputError where parameters are missing; warn of those that the model's files have no place for."""
    own, there = ({path for path, _ in paths(p)} for p in (definition.abstract_params(), params))
    if missing := sorted(own - there):
        raise InputError(
            f"save: these are not the model's parameters, '{'.'.join(missing[0])}' is missing; save one of several "
            "models with its own, such as policy.with_params(state.params['policy'])"
        )
    if extra := sorted(there - own):
        listed = ", ".join(".".join(path) for path in extra[:5])
        warnings.warn(f"save: the model's files have no place for {listed}", stacklevel=4)
