"""Log the parameters themselves: histograms, norms, zeros, and how far an update moves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core.errors import InputError, warn
from rlhf_core.fit.actions import Action, Moment
from rlhf_core.mesh import replicated_sharding
from rlhf_core.models.params import absent_lines, named, numbered, paths
from rlhf_core.runtime.files import append_line

if TYPE_CHECKING:
    from rlhf_core.config.trainer import LogWeights
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState

FILE = "weights.jsonl"
BINS = 64


def chosen(state: TrainState, pattern: str, stage: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Find the layers of trained parameters that an expression names, see `params.named`.

    Returns ({dotted path of a parameter: {path of a layer, with its number: its index}}, lines about alternatives that
    name nothing). Raises InputError, naming the stage, where there is none.
    """
    params = state.trained().params
    fixed = dict(state.fixed_layers)
    found = named(params, pattern, state.model, f"stage '{stage}'.log_weights.pattern", "trained parameter")
    layers: dict[str, dict[str, Any]] = {}
    for path, leaf in paths(params):
        if path not in found.whole and path not in found.layers:
            continue
        trained = {
            name: index
            for name, index in numbered(state.model, path, leaf)
            if index in found.layers.get(path, (index,)) and index not in fixed.get(path, ())
        }
        layers |= {".".join(path): trained} if trained else {}
    if not layers:
        raise InputError(f"stage '{stage}'.log_weights.pattern: '{pattern}' matches no trained parameter")
    return layers, absent_lines(found.absent, "trained parameter")


def statistics(before: Any, after: Any) -> dict[str, jax.Array]:
    """Describe one parameter after an update, by the names of the hook `rlhf_weights`; before: the same before it."""
    values = after.astype(jnp.float32).ravel()
    moved = (after - before).astype(jnp.float32)
    least, largest = values.min(), values.max()
    width = jnp.where(largest > least, (largest - least) / BINS, 1.0)
    bins = jnp.clip(jnp.floor((values - least) / width), 0, BINS - 1).astype(jnp.int32)
    norm = jnp.linalg.norm(before.astype(jnp.float32).ravel())
    return {
        "norm": jnp.linalg.norm(values),
        "zeros": jnp.mean(values == 0),
        "update_ratio": jnp.where(
            norm > 0, jnp.linalg.norm(moved.ravel()) / jnp.where(norm > 0, norm, 1.0), 0.0
        ),
        "least": least,
        "largest": largest,
        "counts": jnp.zeros(BINS, jnp.int32).at[bins].add(1),
    }


def log_weights(stage: Stage, options: LogWeights, state: TrainState) -> Action:
    """Make the action that logs the parameters that a pattern chooses.

    Raises InputError where the pattern matches no trained parameter, and warns where an alternative does not.
    """
    log = WeightLog(stage, options, state)
    return Action(log.due, log, "move")


class WeightLog:
    """Logs the parameters that a pattern chooses, after the updates that are due."""

    def __init__(self, stage: Stage, options: LogWeights, state: TrainState) -> None:
        self.stage, self.every = stage, options.every
        self.layers, absent = chosen(state, options.pattern, stage.name)
        for line in absent if stage.is_main else ():
            warn(f"stage '{stage.name}'.log_weights.pattern: {line}")
        everywhere = replicated_sharding(state.step.sharding.mesh)
        self._describe = jax.jit(self._all, out_shardings=everywhere)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self._before: dict[str, Any] | None = None

    def due(self, at: Moment) -> bool:
        """Return whether this update is logged, or the next one, which overwrites the parameters."""
        return at.step % self.every == 0 or (at.step + 1) % self.every == 0

    def __call__(self, at: Moment) -> None:
        """Log the parameters of this update, and copy those that the next one is compared with."""
        before, self._before = self._before, None
        if before is not None:
            self.log(at.step, before, at.state)
        if (at.step + 1) % self.every == 0 and not at.ends:
            self._before = self._copy(self._chosen(at.state))

    def log(self, count: int, before: Mapping[str, Any], state: TrainState) -> None:
        """Write a row of weights.jsonl, and tell loggers. before: the parameters before update `count`."""
        found = jax.device_get(self._describe(before, self._chosen(state)))
        weights = {
            name: {key: value.tolist() for key, value in parts.items()} for name, parts in found.items()
        }
        if self.stage.is_main:
            append_line(self.stage.dir / FILE, json.dumps({"step": count, "weights": weights}))
        self.stage.hook.rlhf_weights(stage=self.stage, step=count, weights=weights)

    def _chosen(self, state: TrainState) -> dict[str, Any]:
        params = {".".join(path): leaf for path, leaf in paths(state.trained().params)}
        return {name: params[name] for name in self.layers}

    def _all(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, jax.Array]]:
        found = {}
        for name, leaf in after.items():
            for layer, index in self.layers[name].items():
                found[layer] = statistics(before[name][index], leaf[index])
        return found
