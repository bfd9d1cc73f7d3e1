"""The policy as it was when training began, which a KL penalty compares with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.mesh import on_host, replicated_sharding, with_shardings
from rlhf_core.models.params import join, split
from rlhf_core.runtime.background import BackgroundCompiler
from rlhf_core.runtime.machine import platform
from rlhf_core.state import fixed_parameters

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.models import Definition


class Reference:
    """A copy of the parameters that are trained; the others are the policy's own arrays.

    With adapters, which start without effect, that is the base model, which is in memory once.

    apart: whether it is known to differ from the policy. moves: whether `move` will be called. offload: whether the
    copy is in the host's memory while it is not read.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        frozen: str | Sequence[str] | None,
        mesh: Mesh,
        *,
        moves: bool = False,
        offload: bool = False,
        definition: Definition | None = None,
    ) -> None:
        """Copy what is trained. params: the policy's, or shapes. frozen: the config's `frozen_parameters`.

        definition: the policy's; needed where `frozen` has numbers of layers that are of several kinds.
        """
        self._fixed = fixed_parameters(params, frozen, definition)
        self._mesh = mesh
        self.moves = moves
        trained, self._rest = split(params, self._fixed)
        self._compiler = BackgroundCompiler()
        # The loop donates the policy's buffers to every update.
        self._here = jax.tree.map(lambda x: x.sharding, trained) if offload else None
        self._trained = self._away(jax.tree.map(_copy, trained))
        self._equal = jax.jit(jnp.array_equal, out_shardings=replicated_sharding(mesh))
        self.apart = False

    @property
    def copied(self) -> Any:
        """The parameters that are in memory besides the policy's."""
        return self._trained

    @property
    def params(self) -> Any:
        """All parameters, as the model takes them."""
        return join(self._read(), self._rest)

    def _read(self) -> Any:
        """Return the copy, in the devices' memory."""
        return self._trained if self._here is None else _put(self._trained, self._here)

    def _away(self, copy: Any) -> Any:
        """Return a copy in the memory where it waits."""
        return copy if self._here is None else _put(copy, jax.tree.map(on_host, self._here))

    def equals(self, params: Mapping[str, Any]) -> bool:
        """Return whether the policy's parameters equal the reference's, bit for bit; compare until they once differ.

        Then the KL is 0, and so is the gradient of k2 and k3. But two programs round the same log-probability
        differently, and an optimizer such as AdamW turns a gradient of rounding into whole steps.
        """
        if not self.apart:
            pairs = zip(
                jax.tree.leaves(split(params, self._fixed)[0]), jax.tree.leaves(self._read()), strict=True
            )
            # The smallest first: after an update they differ, and nothing is compiled for the others.
            smallest_first = sorted(pairs, key=lambda pair: pair[0].size)
            self.apart = not all(self._same(ours, theirs) for ours, theirs in smallest_first)
        return not self.apart

    def _same(self, ours: jax.Array, theirs: jax.Array) -> bool:
        if platform() == "cpu" and jax.process_count() == 1:  # there is nothing to fetch, nor to compile
            return np.array_equal(ours, theirs)
        return bool(self._equal(ours, theirs))

    def compile(self, share: float) -> None:
        """Start to compile `move` in the background; nothing is computed."""
        copy = self._read()
        self._compiler.compile("mix", _mix.lower(copy, copy, share))

    def move(self, params: Mapping[str, Any], share: float) -> None:
        """Set reference ← share · policy + (1 − share) · reference (TR-DPO, Gorbatovski et al. 2024)."""
        self._compiler.wait("mix")
        self._trained = self._away(_mix(split(params, self._fixed)[0], self._read(), share))
        self.apart = False

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint keeps of a reference that moves."""
        whole = self._read()
        if jax.process_count() > 1:
            whole = jax.jit(_gather, out_shardings=replicated_sharding(self._mesh))(whole)
        leaves = jax.tree_util.tree_leaves_with_path(whole)
        return {_name(path): np.asarray(leaf) for path, leaf in leaves}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put back what `snapshot` returned."""
        self._trained = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(arrays[_name(path)], leaf.sharding), self._trained
        )


def _put(tree: Any, shardings: Any) -> Any:
    """Place arrays, or shapes."""
    shapes = isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct)
    return with_shardings(tree, shardings) if shapes else jax.device_put(tree, shardings)


@jax.jit
def _mix(policy: Any, reference: Any, share: Any) -> Any:
    # Rounding must not take a reference away from a policy that it equals.
    return jax.tree.map(lambda p, r: jnp.where(p == r, r, share * p + (1 - share) * r), policy, reference)


def _copy(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.copy(x)


def _gather(tree: Any) -> Any:
    return tree


def _name(path: Any) -> str:
    return "reference" + jax.tree_util.keystr(path)
