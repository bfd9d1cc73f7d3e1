"""The training state: one pytree of arrays, with the model and the optimizer as its static part."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core.mesh import AnyMesh, replicated
from rlhf_core.models.lora import untrained
from rlhf_core.partition import Path, join, matching, split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import optax

    from rlhf_core.models import Definition, Model


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "key", "guard"],
    meta_fields=["model", "tx", "fixed"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an update reads and writes. Only the arrays are checkpointed.

    step: int32 [], updates applied.
    params: nested dict of float32 arrays. opt_state: what `tx.init` made of those that are trained.
    key: typed PRNG key [], constant through a run; users fold the step into it.
    guard: int32 [], -1, or the step of the first update whose loss or gradient was not finite. Once set, no update
        is applied any more.
    model: static description of the model (no arrays). tx: the optimizer. fixed: the paths of parameters that are not
        trained: they have no gradient and no optimizer state.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any
    guard: Any
    model: Definition
    tx: optax.GradientTransformation
    fixed: frozenset[Path] = frozenset()

    def trained(self) -> TrainState:
        """The state without the parameters that are not trained: what an update writes and a checkpoint holds."""
        return dataclasses.replace(self, params=split(self.params, self.fixed)[0], fixed=frozenset())

    def with_trained(self, other: TrainState) -> TrainState:
        """`other`, a state as `trained` gives it, with this one's fixed parameters."""
        params = join(other.params, split(self.params, self.fixed)[1])
        return dataclasses.replace(other, params=params, fixed=self.fixed)


def create_state(
    model: Model,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    frozen: str | Sequence[str] | None = None,
) -> TrainState:
    """A state at step 0 that shares its parameter buffers with `model`; optimizer state is sharded like them.

    frozen: regular expressions; parameters whose dotted path one is found in are not trained. Of a model with adapters
    these alone are, with its reward head. Raises InputError for an expression that is found in no path.
    """
    fixed = fixed_parameters(model.params, frozen)
    trained = split(model.params, fixed)[0]
    shardings = jax.tree.map(lambda x: x.sharding, trained)
    mesh = model.mesh
    abstract = jax.eval_shape(tx.init, trained)
    opt_shardings = optimizer_shardings(abstract, trained, shardings, mesh)
    opt_state = jax.jit(tx.init, out_shardings=opt_shardings)(trained)
    whole = replicated(mesh)
    step, guard = jax.device_put((np.int32(0), np.int32(-1)), (whole, whole))
    key = jax.jit(lambda: jax.random.key(seed), out_shardings=whole)()
    return TrainState(step, model.params, opt_state, key, guard, model.definition, tx, fixed)


def fixed_parameters(params: Mapping[str, Any], frozen: str | Sequence[str] | None) -> frozenset[Path]:
    """The paths of parameters that `create_state` would not train."""
    return untrained(params) | (matching(params, frozen) if frozen else frozenset())


def optimizer_shardings(abstract: Any, params: Any, shardings: Any, mesh: AnyMesh) -> Any:
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
