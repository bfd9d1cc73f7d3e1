"""The policies of a stage that are still kept, and what they think of the tokens of rollouts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_audit.subject import Subject
from rlhf_core import InputError, RunError, Stage, load_model
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.fit import TreeReader
from rlhf_core.mesh import row_multiple
from rlhf_core.models import Model, join
from rlhf_core.packing import MICRO_BATCH_TOKENS, Tree, choose_layout
from rlhf_core.rollouts import Rollout
from rlhf_core.rollouts.sampling_test import read_moments
from rlhf_core.sampling.filters import filtered
from rlhf_core.training import OnDevices

PUBLISHED = re.compile(r"policy-v(\d+)")
"""The directory of a policy that was published to engines, by the updates applied to it."""
PROBE = "probe.npz"
"""What a published policy has once it is whole."""


class KeptPolicies:
    """Policies of a stage by the updates applied to them: the first one, those of checkpoints, and published ones.

    One is in memory at a time.
    """

    def __init__(self, subject: Subject, stage: Stage) -> None:
        """stage: as it was asked for, with its devices. Raises InputError where its first policy cannot be opened."""
        self.config: Any = stage.specification().config
        self.first: Model = OnDevices(self.config, stage).model("lm")
        self._stage, self._dir = stage, subject.dir
        self._held: tuple[int, Model] | None = None
        self._readers: dict[Any, TreeReader] = {}

    @cached_property
    def places(self) -> Mapping[int, Path | None]:
        """Where each policy is kept; None: the one that training starts from."""
        published = Path(self.config.sampler.options.get("directory") or self._dir / "policies")
        found: dict[int, Path | None] = {}
        for path in sorted(published.glob("policy-v*")):
            matched = PUBLISHED.fullmatch(path.name)
            if matched and (path / PROBE).is_file():
                found[int(matched[1])] = path
        for path in self._dir.glob("checkpoints/[0-9]*"):
            if path.name.isdecimal():
                found[int(path.name)] = path
        if not self.config.checkpoints.start:
            found[0] = None
        return found

    def open(self, version: int) -> Model:
        """Open a policy. Raises RunError or InputError where it is damaged."""
        if self._held is None or self._held[0] != version:
            place = self.places[version]
            self._held = version, self.first if place is None else self._opened(place)
        return self._held[1]

    def _opened(self, place: Path) -> Model:
        if place.name.isdecimal():
            return self._with_checkpoint(place)
        published = load_model(place, "lm", mesh=self.first.mesh, registry=self._stage.registry)
        published = published.computing(dtype=self.config.dtype, remat=self.config.remat)
        definition = published.definition.as_policy(self.first.tokenizer)
        return Model(
            definition, published.params, self.first.tokenizer, published.hf_config, None, published.mesh
        )

    def _with_checkpoint(self, place: Path) -> Model:
        """Return the model with the parameters of a checkpoint, which has those alone that are trained."""
        try:
            shapes = json.loads((place / "host.json").read_bytes())["leaves"]
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{place} cannot be read: {error}") from error
        wanted = {name: _described(shape) for name, shape in shapes.items()}
        checkpoints = Checkpoints(place.parent, keep=None)
        try:
            saved = checkpoints.restore(wanted, int(place.name))
        finally:
            checkpoints.close()
        assert saved is not None
        trained: dict[str, Any] = {}
        for name, array in saved.state.items():
            root, *path = name.split(".")
            if root == "params":
                _put(trained, path, array)
        # Where a state holds several models, the one that samples goes by this name.
        trained = trained.get("policy", trained)
        params = join(trained, _without(self.first.params, trained))
        placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, self.first.params)
        return self.first.with_params(placed)

    def moments(
        self, version: int, rollout: Rollout, mask: NDArray[np.bool_], *, filters: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """Compute the moments of tokens under a policy: {name of Moments: float32 [tokens]}, in the mask's order.

        mask: bool [N, C]. filters: under what the filters of sampling leave of the policy.
        """
        model = self.open(version)
        trees = [
            Tree(tree.prefix, (branch,), (weights,))
            for tree in rollout.trees(None, mask=mask)
            for branch, weights in zip(tree.branches, tree.weights or (), strict=True)
            if weights.any()
        ]
        reader = self._reader(model, trees, filters=filters)
        found = reader(model.params, trees)
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _reader(self, model: Model, trees: list[Tree], *, filters: bool) -> TreeReader:
        """Make what reads trees with models of a definition, in rows that suit the first trees."""
        key = model.definition, filters
        if key not in self._readers:
            sizes = [len(tree.prefix) + len(tree.branches[0]) for tree in trees]
            layout = choose_layout(
                sizes,
                1,
                hidden_size=model.definition.hidden_size,
                max_tokens=MICRO_BATCH_TOKENS,
                trained_counts=[len(tree.branches[0]) for tree in trees],
                row_multiple=row_multiple(model.mesh),
                updates=1,
            )
            sampling = self.config.sampling
            keep = partial(filtered, options=sampling) if filters else None
            read = partial(read_moments, model.definition, sampling.temperature or 1.0, keep)
            self._readers[key] = TreeReader(read, layout, model.mesh, per="token")
        return self._readers[key]


def _described(shape: str) -> jax.ShapeDtypeStruct:
    """Return what an array is, from how a checkpoint writes it: `float32[2,3]`."""
    dtype, sizes = shape.removesuffix("]").split("[")
    axes = tuple(int(size) for size in sizes.split(",") if size)
    if dtype.startswith("key<"):
        return jax.ShapeDtypeStruct(axes, jax.eval_shape(lambda: jax.random.key(0)).dtype)
    return jax.ShapeDtypeStruct(axes, jnp.dtype(dtype))


def _put(tree: dict[str, Any], path: list[str], array: Any) -> None:
    """Put an array at a path of nested tables."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = array


def _without(params: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that `others` does not have."""
    left: dict[str, Any] = {}
    for name, value in params.items():
        if name not in others:
            left[name] = value
        elif isinstance(value, Mapping):
            rest = _without(value, others[name])
            if rest:
                left[name] = rest
    return left


def problem_of(error: InputError | RunError) -> str:
    """Return the first line of an error."""
    return str(error).splitlines()[0]
