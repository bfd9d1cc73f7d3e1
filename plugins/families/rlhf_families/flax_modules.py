"""Models as flax modules, and flax modules as models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlhf_core import InputError, ModelFamily
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Definition, Model, cached, open_weights, paths, save_tensors

if TYPE_CHECKING:
    from jax.sharding import Mesh

Make = Callable[[Mapping[str, Any], nnx.Rngs], nnx.Module]
"""(config.json, rngs) → a module with `__call__(input_ids, positions, attention_mask)` → logits."""


def nnx_family(model_type: str, make: Make) -> ModelFamily:
    """Make the family of the models that `make` builds from a config.json and nnx.Rngs: registry.add(MODEL, …).

    A module is called with input_ids and positions, int32 [B, T], and attention_mask, bool [B, T, T], which tells which
    tokens a token sees; it returns logits, [B, T, vocab]. A row may hold several sequences: the mask and the positions
    alone tell them apart, so that a module must use no others. All its state is nnx.Param, float32; parameters have the
    module's own names in model.safetensors.

    Without a cache, sampling runs the module over the whole row for every token. A module has a cache where it has two
    more methods. `prefill`, with the arguments of a call, returns (logits, cache): a tree of arrays [B, T, …], an entry
    per token. `decode(cache, input_ids, positions, visible, slot)`, of one token per row, int32 [B], returns (logits
    [B, vocab], the cache with the token's entry at index `slot`); visible is bool [B, S], the entries that the token
    sees, its own included.

    A module with a method `hidden`, of the same arguments, that returns hidden states [B, T, D] can be a reward model:
    its reward head, `score.weight` [1, D] in the files, reads them. In bfloat16 the module gets its parameters so; one
    whose layers name no dtype of their own then computes in it.
    """

    def define(hf_config: Mapping[str, Any], head: str) -> Definition:
        described = json.dumps(dict(hf_config), sort_keys=True)
        _describe(make, described)  # checks the module
        if head == "lm":
            return NnxDefinition(make, described)
        definition = NnxScorer(make, described, head="score")
        definition.hidden_size  # noqa: B018  (checks `hidden`)
        return definition

    return ModelFamily((model_type,), define)


def nnx_model(
    module: nnx.Module,
    *,
    tokenizer: Any | None = None,
    mesh: Mesh | None = None,
    config: Mapping[str, Any] | None = None,
) -> Model:
    """Make a model of a flax module and its parameters, as `nnx_family` describes modules.

    mesh: the devices for the parameters; default: one device. config: the fields of config.json, for a family that
    reads what is saved; default: the module's class as `model_type`.
    """
    fields = {"model_type": type(module).__name__} if config is None else dict(config)
    definition = nnx_family(fields["model_type"], lambda *_: module).define(fields, "lm")
    params = _named(nnx.state(module, nnx.Param))
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    params = jax.device_put(params, definition.shardings(mesh))
    return Model(definition, params, tokenizer, fields, None, mesh)


class _Tokens(NamedTuple):
    """What takes the place of a cache: the tokens so far, int32 [B, S]."""

    tokens: jax.Array
    positions: jax.Array


@dataclass(frozen=True, eq=False)
class NnxDefinition(Definition):
    """A flax module as a model, whose hidden states are its logits.

    make: see `nnx_family`; hf_config: its argument, as JSON.
    """

    make: Make
    hf_config: str
    dtype: str = "float32"
    """Of the computation, "float32" or "bfloat16"; the module gets its parameters so."""

    @property
    def vocab_size(self) -> int:
        return self._width("__call__")

    @property
    def hidden_size(self) -> int:
        return self.vocab_size

    @property
    def compute_dtype(self) -> Any:
        return jnp.dtype(self.dtype)

    def _width(self, method: str) -> int:
        """Return the size of the last axis of what a method of the module returns."""
        at = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        seen = jax.ShapeDtypeStruct((1, 1, 1), jnp.bool_)
        call = partial(self._call, method=method)
        return int(jax.eval_shape(call, _describe(self.make, self.hf_config)[1], at, at, seen).shape[-1])

    def abstract_params(self) -> dict[str, Any]:
        return _describe(self.make, self.hf_config)[1]

    def logical_axes(self) -> dict[str, Any]:
        return jax.tree.map(lambda leaf: (None,) * leaf.ndim, self.abstract_params())

    def init(self, key: jax.Array) -> dict[str, Any]:
        return _named(nnx.state(self.make(json.loads(self.hf_config), nnx.Rngs(key)), nnx.Param))

    def load(self, directory: Path, shardings: Any) -> dict[str, Any]:
        readers = open_weights(directory)
        params = _describe(self.make, self.hf_config)[1]
        expected = {".".join(path): leaf.shape for path, leaf in paths(params)}
        stored = {name: tuple(reader.header[name]["shape"]) for name, reader in readers.items()}
        if self.head == "score":
            stored.pop(HEAD, None)
        problems = sorted(expected.items() ^ stored.items())
        if problems:
            name = problems[0][0]
            raise InputError(
                f"{directory}: '{name}' has the shape {stored.get(name, 'of no tensor')} in the files, and "
                f"{expected.get(name, 'of no parameter')} in the module"
            )

        def read(path: Any, sharding: Any) -> jax.Array:
            name = ".".join(entry.key for entry in path)
            return jax.device_put(np.asarray(readers[name].view(name), np.float32), sharding)

        loaded: dict[str, Any] = jax.tree.map_with_path(read, shardings)
        return loaded

    def save(self, params: Any, directory: Path, dtype: str) -> None:
        save_tensors(self._tensors(params), directory, dtype)

    def _tensors(self, params: Any) -> dict[str, jax.Array]:
        """Name the arrays as the files do."""
        return {".".join(path): leaf for path, leaf in paths(params)}

    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array:
        """Compute the logits, float32 [rows, time, vocab]."""
        return self._call(params, tokens, positions, _seen(tokens, visible_until))

    def _call(
        self, params: Any, tokens: Any, positions: Any, seen: Any, method: str = "__call__"
    ) -> jax.Array:
        # A softmax over nothing would be NaN at unused places, and its gradient everywhere.
        seen = seen | jnp.eye(tokens.shape[1], dtype=bool)
        call = getattr(self._module(params), method)
        found: jax.Array = call(tokens, positions=positions, attention_mask=seen)
        return found.astype(jnp.float32)

    def _module(self, params: Any) -> Any:
        """Return the module with these parameters, in the dtype of the computation."""
        if self.dtype != "float32":
            params = jax.tree.map(lambda leaf: leaf.astype(self.dtype), params)
        return nnx.merge(_describe(self.make, self.hf_config)[0], nnx.restore_int_paths(params))

    @cached_property
    def _has_cache(self) -> bool:
        module = type(nnx.eval_shape(lambda: self.make(json.loads(self.hf_config), nnx.Rngs(0))))
        return hasattr(module, "prefill") and hasattr(module, "decode")

    def unembedding(self, params: Any) -> tuple[None, None]:
        return None, None

    def prefill(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> tuple[jax.Array, Any]:
        if not self._has_cache:
            return self.hidden(params, tokens, positions, visible_until), _Tokens(tokens, positions)
        seen = _seen(tokens, visible_until) | jnp.eye(tokens.shape[1], dtype=bool)
        logits, cache = self._module(params).prefill(tokens, positions=positions, attention_mask=seen)
        return logits.astype(jnp.float32), cache

    def ring(self, cache: Any, length: int, slot: Any) -> Any:
        def turned(x: jax.Array) -> jax.Array:
            fill = [(0, 0), (length - x.shape[1], 0), *[(0, 0)] * (x.ndim - 2)]
            return jnp.roll(jnp.pad(x, fill), slot, axis=1)

        return jax.tree.map(turned, cache)

    def prepare(self, params: Any) -> Any:
        return params

    def decode(
        self, params: Any, cache: Any, tokens: Any, positions: Any, visible: Any, slot: Any
    ) -> tuple[jax.Array, Any]:
        if self._has_cache:
            logits, cache = self._module(params).decode(cache, tokens, positions, visible, slot)
            return logits.astype(jnp.float32), cache
        new = _Tokens(tokens, positions)
        cache = jax.tree.map(lambda x, y: x.at[:, slot].set(y), cache, new)
        earlier = cache.positions[:, None] <= cache.positions[:, :, None]
        logits = self._call(params, cache.tokens, cache.positions, earlier & visible[:, None])
        return logits[:, slot], cache


@dataclass(frozen=True, eq=False)
class NnxScorer(NnxDefinition):
    """A flax module with hidden states as a reward model: its head, {"score": {"kernel": [D, 1]}}, reads them."""

    @property
    def hidden_size(self) -> int:
        name = type(nnx.eval_shape(lambda: self.make(json.loads(self.hf_config), nnx.Rngs(0)))).__name__
        module = super().abstract_params()
        if "score" in module:
            raise InputError(
                f"{name}: it has a part called 'score', which is the name of the reward head; rename it"
            )
        try:
            return self._width("hidden")
        except AttributeError as error:
            raise InputError(
                f"{name}: it has no method hidden(input_ids, positions, attention_mask) that returns hidden states "
                f"[B, T, D], which a reward head reads ({error})"
            ) from None

    def abstract_params(self) -> dict[str, Any]:
        kernel = jax.ShapeDtypeStruct((self.hidden_size, 1), jnp.float32)
        return {**super().abstract_params(), "score": {"kernel": kernel}}

    def init(self, key: jax.Array) -> dict[str, Any]:
        of_module, of_head = jax.random.split(key)
        kernel = jax.random.normal(of_head, (self.hidden_size, 1)) / self.hidden_size**0.5
        return {**super().init(of_module), "score": {"kernel": kernel}}

    def load(self, directory: Path, shardings: Any) -> dict[str, Any]:
        readers = open_weights(directory)
        module = {name: each for name, each in shardings.items() if name != "score"}
        loaded = super().load(directory, module)
        if HEAD in readers:
            kernel = np.asarray(readers[HEAD].view(HEAD), np.float32).T
            loaded["score"] = {"kernel": jax.device_put(kernel, shardings["score"]["kernel"])}
        return loaded

    def _tensors(self, params: Any) -> dict[str, jax.Array]:
        module = {name: each for name, each in params.items() if name != "score"}
        return {**super()._tensors(module), HEAD: params["score"]["kernel"].T}

    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array:
        """Compute the module's hidden states, float32 [rows, time, D]."""
        module = {name: each for name, each in params.items() if name != "score"}
        return self._call(module, tokens, positions, _seen(tokens, visible_until), "hidden")

    def score(self, params: Any, hidden: jax.Array) -> jax.Array:
        return jnp.dot(
            hidden.astype(jnp.float32), params["score"]["kernel"][:, 0], precision=jax.lax.Precision.HIGHEST
        )


HEAD = "score.weight"
"""The reward head's name in the files, as transformers writes it: [1, D]."""


def _seen(tokens: jax.Array, visible_until: jax.Array) -> jax.Array:
    """Return which tokens a token sees, bool [rows, time, time]."""
    at = jnp.arange(tokens.shape[1])
    return (at <= at[:, None]) & (at[:, None] < visible_until[:, None])


@cached
def _describe(make: Make, hf_config: str) -> tuple[Any, dict[str, Any]]:
    """Return a module without its arrays, and their shapes.

    Raises InputError for a module that is not as `nnx_family` describes.
    """
    module = nnx.eval_shape(lambda: make(json.loads(hf_config), nnx.Rngs(0)))
    name = type(module).__name__
    try:
        inspect.signature(module).bind(None, positions=None, attention_mask=None)
    except TypeError as error:
        raise InputError(
            f"{name}: its __call__ must take (input_ids, positions, attention_mask), the mask bool [B, T, T]: {error}"
        ) from None
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    other = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
    if other:
        raise InputError(
            f"{name}: '{other[0]}' is no nnx.Param; a model keeps no other state: make dropout without rngs"
        )
    shapes = _named(params)
    for path, leaf in paths(shapes):
        if leaf.dtype != jnp.float32:
            raise InputError(f"{name}: '{'.'.join(path)}' is {leaf.dtype}; make it with param_dtype float32")
    return graph, shapes


def _named(state: Any) -> dict[str, Any]:
    """Turn a state into a nested dict with texts for keys; `nnx.restore_int_paths` turns numbers back."""

    def named(tree: Any) -> Any:
        return {str(k): named(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree

    pure: dict[str, Any] = named(nnx.to_pure_dict(state))
    return pure


def nnx_module(model: Model) -> NnxModel:
    """Return a model as a flax nnx.Module that shares its arrays."""
    return NnxModel(model.definition, model.params)


class NnxModel(nnx.Module):
    """A model as a flax module: its parameters are attributes with the names of `Model.params`.

    `nnx.state`, `nnx.split`, `nnx.merge` and `nnx.grad` see the arrays of the model. definition: static.
    """

    def __init__(self, definition: Definition, params: Mapping[str, Any]) -> None:
        self.definition = definition
        for name, value in params.items():
            setattr(self, name, _variables(value))

    def __call__(self, input_ids: Any, attention_mask: Any | None = None) -> jax.Array:
        """Compute logits, float32 [B, T, vocab], as `Model.logits`; of a reward model the scores, float32 [B].

        attention_mask: integers [B, T], padding on either side; None: all tokens are attended.
        """
        ids = jnp.asarray(input_ids, jnp.int32)
        mask = jnp.ones_like(ids) if attention_mask is None else jnp.asarray(attention_mask, jnp.int32)
        params = nnx.to_pure_dict(nnx.state(self))
        if self.definition.head == "score":
            return self.definition.padded_scores(params, ids, mask)
        return self.definition.padded_logits(params, ids, mask)


def _variables(value: Any) -> Any:
    if isinstance(value, Mapping):
        return nnx.Dict({name: _variables(inner) for name, inner in value.items()})
    # A key of dropout is an integer, which has no gradient.
    return nnx.Param(value) if jnp.issubdtype(value.dtype, jnp.floating) else nnx.Variable(value)
