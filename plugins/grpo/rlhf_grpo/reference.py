"""The policy that KL is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.mesh import replicated_sharding
from rlhf_core.models.params import join, split
from rlhf_core.runtime.background import Ahead

if TYPE_CHECKING:
    from jax.sharding import Mesh


class Reference:
    """The policy as it was when the stage began: a copy of what is trained, and the very arrays that are not.

    With adapters, which start without effect, that is the base model, of which there is one in memory.
    """

    def __init__(self, params: Mapping[str, Any], fixed: frozenset[tuple[str, ...]], mesh: Mesh) -> None:
        """params: of the policy; fixed: the paths of those that are not trained."""
        trained, self._rest = split(params, fixed)
        self._fixed, self._mesh = fixed, mesh
        self._ahead = Ahead()
        self._trained = jax.tree.map(
            jnp.copy, trained
        )  # the loop donates the policy's buffers to every update

    @property
    def params(self) -> Any:
        return join(self._trained, self._rest)

    @cached_property
    def _mix(self) -> Any:
        return jax.jit(
            lambda policy, own, share: jax.tree.map(lambda p, r: share * p + (1 - share) * r, policy, own)
        )

    @cached_property
    def _gather(self) -> Any:
        return jax.jit(lambda x: x, out_shardings=replicated_sharding(self._mesh))

    def compile(self, params: Any, share: float) -> None:
        """Start to compile what `move` runs, for a policy that is placed like `params`; nothing is computed."""
        policy = split(params, self._fixed)[0]
        self._ahead.compile("mix", self._mix.lower(policy, self._trained, share))

    def move(self, params: Any, share: float) -> None:
        """reference ← share · policy + (1 − share) · reference (TR-DPO, Gorbatovski et al. 2024)."""
        self._ahead.wait("mix")
        self._trained = self._mix(split(params, self._fixed)[0], self._trained, share)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint, of a reference that moves."""
        whole = self._trained if jax.process_count() == 1 else self._gather(self._trained)
        leaves = jax.tree_util.tree_leaves_with_path(whole)
        return {_name(path): np.asarray(leaf) for path, leaf in leaves}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The inverse of `snapshot`."""
        self._trained = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(arrays[_name(path)], leaf.sharding), self._trained
        )


def _name(path: Any) -> str:
    return "reference" + jax.tree_util.keystr(path)
