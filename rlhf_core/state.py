"""The training state: one pytree of arrays, with the model and the optimizer as its static part."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_core.mesh import replicated

if TYPE_CHECKING:
    import optax

    from rlhf_core.models import Definition, Model


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "key", "guard"],
    meta_fields=["model", "tx"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an update reads and writes. Only the arrays are checkpointed.

    step: int32 [], updates applied.
    params: nested dict of float32 arrays. opt_state: what `tx.init(params)` made.
    key: typed PRNG key [], constant through a run; users fold the step into it.
    guard: int32 [], -1, or the step of the first update whose loss or gradient was not finite. Once set, no update
        is applied any more.
    model: static description of the model (no arrays). tx: the optimizer.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any
    guard: Any
    model: Definition
    tx: optax.GradientTransformation


def create_state(model: Model, tx: optax.GradientTransformation, *, seed: int = 0) -> TrainState:
    """A state at step 0 that shares its parameter buffers with `model`; optimizer state is sharded like them."""
    shardings = jax.tree.map(lambda x: x.sharding, model.params)
    mesh = model.mesh
    abstract = jax.eval_shape(tx.init, model.params)
    opt_shardings = optimizer_shardings(abstract, model.params, shardings, mesh)
    opt_state = jax.jit(tx.init, out_shardings=opt_shardings)(model.params)
    whole = replicated(mesh)
    step, guard = jax.device_put((np.int32(0), np.int32(-1)), (whole, whole))
    key = jax.jit(lambda: jax.random.key(seed), out_shardings=whole)()
    return TrainState(step, model.params, opt_state, key, guard, model.definition, tx)


def optimizer_shardings(abstract: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Each leaf of an optimizer state goes where the parameter of the same path ending and shape is, else everywhere.

    `tx.init` under jit would put its zeros on one device. Going by path and shape serves every optimizer that keeps
    the parameters' tree somewhere inside its own, whatever wraps it.
    """
    table = {
        _names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }
    whole = replicated(mesh)

    def place(path: Any, leaf: Any) -> Any:
        names = _names(path)
        for start in range(len(names)):
            if names[start:] in table:
                shape, sharding = table[names[start:]]
                return sharding if shape == leaf.shape else whole
        return whole

    return jax.tree_util.tree_map_with_path(place, abstract)


def abstract_state(state: TrainState) -> TrainState:
    """The same tree with shapes, dtypes and shardings in place of arrays, as checkpoints are restored onto."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
