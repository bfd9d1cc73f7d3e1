"""The training state: a pytree of arrays, with the model and the optimizer as static fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.errors import InputError, suggest, warn
from rlhf_core.mesh import AnyMesh, on_host, replicated_sharding, with_shardings
from rlhf_core.models.lora import has_adapters, layers_without_adapters, untrained
from rlhf_core.models.params import (
    Layers,
    Named,
    Path,
    absent_lines,
    join,
    matching,
    named,
    paths,
    split,
    without_layers,
)

if TYPE_CHECKING:
    import optax

    from rlhf_core.models import Definition, Model

__all__: list[str] = []


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "key", "guard"],
    meta_fields=["model", "tx", "fixed", "fixed_layers"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an update reads and writes. Only the arrays are checkpointed.

    step: int32 [], updates applied.
    params: nested dict of float32 arrays. opt_state: what `tx.init` made of those that are trained.
    key: typed PRNG key [], constant through a run; users fold the step into it.
    guard: int32 [], -1, or the step of the first update whose loss or gradient was not finite, after which no update
        is applied.
    model: static definition of the model (no arrays), or of several by name. tx: the optimizer.
    fixed: paths of parameters that are not trained and have no gradient or optimizer state.
    fixed_layers: (path, indices of layers) of stacks of which some layers are not trained. These have a gradient, which
        nothing reads, and no optimizer state.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any
    guard: Any
    model: Any
    tx: optax.GradientTransformation
    fixed: frozenset[Path] = frozenset()
    fixed_layers: Layers = ()

    def trained(self) -> TrainState:
        """Drop the parameters that are not trained, leaving what an update writes and a checkpoint holds."""
        return dataclasses.replace(self, params=split(self.params, self.fixed)[0], fixed=frozenset())

    def with_trained(self, other: TrainState) -> TrainState:
        """Add this state's fixed parameters to `other`, a state that `trained` returned."""
        params = join(other.params, split(self.params, self.fixed)[1])
        return dataclasses.replace(other, params=params, fixed=self.fixed)


@dataclasses.dataclass(frozen=True)
class Definitions(Mapping[str, "Definition"]):
    """Definitions of several models by name; hashable, since they are static under jit."""

    entries: tuple[tuple[str, Definition], ...]

    def __getitem__(self, name: str) -> Definition:
        return dict(self.entries)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def create_state(
    model: Model | Mapping[str, Model],
    tx: optax.GradientTransformation | Mapping[str, optax.GradientTransformation],
    *,
    seed: int = 0,
    frozen: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
    offload: bool = False,
) -> TrainState:
    """Make a state at step 0 that shares its parameter buffers with `model` and shards its optimizer state like them.

    A model of shapes alone, as `Context.model` makes it for a check, gives a state of shapes alone.

    model: one model, or several by name, {"policy": …, "critic": …}: the state's `params` and `model` are then also
        keyed by name, and the rules below hold for each model.
    tx: one for all models, or one per name. It sees only the parameters that are trained.
    frozen: regular expressions; a parameter is not trained if one of them matches part of its dotted path. A layer of
        its own has its number in it, "layers.0.mlp". With several models the path begins with the model's name, unless
        the expressions are given by name. A model with adapters trains only these and its reward head.
    offload: whether the optimizer's state is in the host's memory between updates.

    Raises InputError if an expression matches no path, if names differ, or if nothing would be trained. Warns of
    alternatives of an expression that match none.
    """
    definition: Any
    if isinstance(model, Mapping):
        params: dict[str, Any] = {name: each.params for name, each in model.items()}
        found = _find_fixed(model, frozen)
        mesh = _shared_mesh(model)
        definition = Definitions(tuple((n, m.definition) for n, m in model.items()))
    else:
        if isinstance(tx, Mapping) or isinstance(frozen, Mapping):
            raise InputError("create_state: tx and frozen by name go with several models by name")
        params, mesh, definition = model.params, model.mesh, model.definition
        found = find_fixed(params, frozen, model.definition)
    fixed = found.whole
    layers = tuple(sorted(found.layers.items()))
    params = _copy_shared(params, fixed)
    trained = split(params, fixed)[0]
    if not trained:
        raise InputError("frozen_parameters: nothing would be trained, not even adapters or heads")
    shardings = jax.tree.map(lambda x: x.sharding, trained)
    updated = jax.eval_shape(partial(without_layers, layers=layers), trained)
    if isinstance(tx, Mapping):
        _require_names(tx, params, trained)
        each_tx = {name: tx[name] for name in trained}
        tx = _by_name(**each_tx)
        opt_shardings: Any = {
            name: optimizer_shardings(
                jax.eval_shape(model_tx.init, updated[name]), updated[name], shardings[name], mesh
            )
            for name, model_tx in each_tx.items()
        }
    else:
        opt_shardings = optimizer_shardings(jax.eval_shape(tx.init, updated), updated, shardings, mesh)
    if offload:
        opt_shardings = jax.tree.map(on_host, opt_shardings)
    replicated = replicated_sharding(mesh)
    if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(seed))
        opt_state = with_shardings(jax.eval_shape(tx.init, updated), opt_shardings)
        step, guard, key = with_shardings((scalar, scalar, key), (replicated,) * 3)
        return TrainState(step, params, opt_state, key, guard, definition, tx, fixed, layers)
    for line in absent_lines(found.absent) if jax.process_index() == 0 else ():
        warn(f"frozen_parameters: {line}")
    # The optimizer's own function where it can be: an equal run then finds what was traced for it.
    init = tx.init if not layers else lambda params: tx.init(without_layers(params, layers))
    opt_state = jax.jit(init, out_shardings=opt_shardings)(trained)
    step, guard = jax.device_put((np.int32(0), np.int32(-1)), (replicated, replicated))
    key = jax.jit(jax.random.key, static_argnums=0, out_shardings=replicated)(seed)
    return TrainState(step, params, opt_state, key, guard, definition, tx, fixed, layers)


def fixed_parameters(
    params: Mapping[str, Any], frozen: str | Sequence[str] | None, model: Definition | None = None
) -> frozenset[Path]:
    """Find the paths of parameters that `create_state` would not train, in any layer.

    model: the definition that `params` belong to; needed if they hold more than the model's, see `untrained`, and if
    its layers are of several kinds.
    """
    return find_fixed(params, frozen, model).whole


def find_fixed(
    params: Mapping[str, Any], frozen: str | Sequence[str] | None, model: Definition | None = None
) -> Named:
    """Find the parameters that `create_state` would not train. model: as for `fixed_parameters`."""
    known = None
    if model is not None and has_adapters(params):
        known = frozenset(path for path, _ in paths(model.abstract_params()))
    own = Named(untrained(params, known), layers_without_adapters(model), [])
    return own if not frozen else _both(params, own, matching(params, frozen, model))


def _both(params: Mapping[str, Any], a: Named, b: Named) -> Named:
    """Join what two searches found."""
    whole = set(a.whole | b.whole)
    layers = {}
    sizes = {path: leaf.shape[0] for path, leaf in paths(params) if path in a.layers or path in b.layers}
    for path, size in sizes.items():
        indices = {*a.layers.get(path, ()), *b.layers.get(path, ())}
        if len(indices) == size:
            whole.add(path)
        elif path not in whole:
            layers[path] = tuple(sorted(indices))
    return Named(frozenset(whole), layers, a.absent + b.absent)


def _find_fixed(
    models: Mapping[str, Model], frozen: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
) -> Named:
    """Find the untrained parameters of several models, as paths that begin with the model's name."""
    params = {name: model.params for name, model in models.items()}
    found = Named(frozenset(), {}, [])
    for name, model in models.items():
        found = _both(params, found, _under(name, find_fixed(model.params, None, model.definition)))
    if isinstance(frozen, Mapping):
        unknown = [name for name in frozen if name not in models]
        if unknown:
            raise InputError(f"frozen: no model is called '{unknown[0]}'.{suggest(unknown[0], models)}")
        for name, patterns in frozen.items():
            each = named(models[name].params, patterns, models[name].definition)
            found = _both(params, found, _under(name, each))
    elif frozen:
        definitions = {name: model.definition for name, model in models.items()}
        found = _both(params, found, matching(params, frozen, definitions))
    return found


def _under(name: str, found: Named) -> Named:
    """Return what was found in one of several models, as paths that begin with the model's name."""
    whole = frozenset((name, *path) for path in found.whole)
    return found._replace(
        whole=whole, layers={(name, *path): indices for path, indices in found.layers.items()}
    )


def _shared_mesh(models: Mapping[str, Model]) -> Any:
    """Return the mesh that all models are on. Raises InputError if they are on different ones."""
    if not models:
        raise InputError("create_state: no model is given")
    (first, mesh), *rest = ((name, model.mesh) for name, model in models.items())
    for name, other in rest:
        if other != mesh:
            raise InputError(f"create_state: the models '{first}' and '{name}' are on different meshes")
    return mesh


def _require_names(tx: Mapping[str, Any], params: Mapping[str, Any], trained: Mapping[str, Any]) -> None:
    unknown = [name for name in tx if name not in params]
    missing = [name for name in trained if name not in tx]
    problems = [f"tx: no model is called '{name}'.{suggest(name, params)}" for name in unknown]
    problems += [f"tx: missing for '{name}', which is trained" for name in missing]
    if problems:
        raise InputError(*problems)


def _by_name(**txs: optax.GradientTransformation) -> optax.GradientTransformation:
    """Combine optimizers into one; each sees the subtree of its name."""
    import optax

    def init(params: Any) -> Any:
        return {name: tx.init(params[name]) for name, tx in txs.items()}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        results = {
            name: tx.update(grads[name], state[name], None if params is None else params[name])
            for name, tx in txs.items()
        }
        return {name: d[0] for name, d in results.items()}, {name: d[1] for name, d in results.items()}

    return optax.GradientTransformation(init, update)


def _copy_shared(params: dict[str, Any], fixed: frozenset[Path]) -> dict[str, Any]:
    """Copy arrays that two parameters share, such as the trunk of a policy and of the critic made from it.

    An update overwrites the buffers of trained parameters. If neither parameter is trained, the array stays shared.
    """
    owners: dict[Any, Path] = {}

    def own(entries: Any, leaf: Any) -> Any:
        path = _names(entries)
        first = owners.setdefault(_buffers(leaf), path)
        return leaf if first == path or {first, path} <= fixed else jnp.copy(leaf)

    copied: dict[str, Any] = jax.tree.map_with_path(own, params)
    return copied


def _buffers(leaf: Any) -> Any:
    """Identify an array's memory: equal for two arrays that share it."""
    try:
        return tuple(shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards)
    except Exception:  # a backend without pointers
        return id(leaf)


def optimizer_shardings(abstract: Any, params: Any, shardings: Any, mesh: AnyMesh) -> Any:
    """Shard each leaf of an optimizer state like the parameter of the same path ending and shape; replicate the rest.

    `tx.init` under jit would put its zeros on one device. Matching path and shape works for every optimizer
    that keeps the parameters' tree somewhere inside its state, no matter how it is wrapped.
    """
    table = {
        _names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }
    replicated = replicated_sharding(mesh)

    def place(path: Any, leaf: Any) -> Any:
        names = _names(path)
        for start in range(len(names)):
            if names[start:] in table:
                shape, sharding = table[names[start:]]
                return sharding if shape == leaf.shape else replicated
        return replicated

    return jax.tree_util.tree_map_with_path(place, abstract)


def abstract_state(state: TrainState) -> TrainState:
    """Replace arrays by their shapes, dtypes and shardings: the form that restoring a checkpoint needs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
