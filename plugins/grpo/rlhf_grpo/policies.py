"""The policies that a rollout is read with: the one that sampled it, and the reference of the KL penalty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core.mesh import abstract_rows, fetch_array, put_rows, replicated_sharding
from rlhf_core.models import join_params, split_params
from rlhf_core.training import BackgroundCompiler
from rlhf_grpo.minibatches import locate

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.packing import Packed
    from rlhf_core.rollouts import Rollout
    from rlhf_grpo.config import GRPOConfig


class Reference:
    """The policy as it was when the stage began: a copy of what is trained, and the same arrays as the policy's for
    what is not.

    With adapters, which start without effect, that is the base model, which is in memory once.
    """

    def __init__(self, params: Mapping[str, Any], fixed: frozenset[tuple[str, ...]], mesh: Mesh) -> None:
        """params: of the policy; fixed: the paths of those that are not trained."""
        trained, self._rest = split_params(params, fixed)
        self._fixed, self._mesh = fixed, mesh
        self._compiler = BackgroundCompiler()
        # The loop donates the policy's buffers to every update.
        self._trained = jax.tree.map(jnp.copy, trained)

    @property
    def params(self) -> Any:
        return join_params(self._trained, self._rest)

    @cached_property
    def _mix(self) -> Any:
        return jax.jit(
            lambda policy, reference, share: jax.tree.map(
                lambda p, r: share * p + (1 - share) * r, policy, reference
            )
        )

    @cached_property
    def _gather(self) -> Any:
        return jax.jit(lambda x: x, out_shardings=replicated_sharding(self._mesh))

    def compile(self, params: Any, share: float) -> None:
        """Start to compile what `move` runs, for a policy that is placed like `params`; nothing is computed."""
        policy = split_params(params, self._fixed)[0]
        self._compiler.compile("mix", self._mix.lower(policy, self._trained, share))

    def move(self, params: Any, share: float) -> None:
        """Set reference ← share · policy + (1 − share) · reference (TR-DPO, Gorbatovski et al. 2024)."""
        self._compiler.wait("mix")
        self._trained = self._mix(split_params(params, self._fixed)[0], self._trained, share)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint keeps of a reference that moves."""
        whole = self._trained if jax.process_count() == 1 else self._gather(self._trained)
        leaves = jax.tree_util.tree_leaves_with_path(whole)
        return {_name(path): np.asarray(leaf) for path, leaf in leaves}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put back what `snapshot` returned."""
        self._trained = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(arrays[_name(path)], leaf.sharding), self._trained
        )


def _name(path: Any) -> str:
    return "reference" + jax.tree_util.keystr(path)


def values_read(config: GRPOConfig, *, reference: bool) -> tuple[str, ...]:
    """Name the values per token that policies are read for: `old_logps` where the policy moves during a rollout.

    reference: whether there is one.
    """
    return (
        *(("old_logps",) if config.updates_per_rollout > 1 else ()),
        *(("ref_logps",) if reference else ()),
        *(("entropies",) if config.top_entropy_quantile < 1 else ()),
    )


class PolicyReader:
    """Reads rollouts with the policy of their start and with the reference, as far as the config needs that.

    names: what `read` returns, see `values_read`.
    """

    def __init__(
        self,
        config: GRPOConfig,
        compute: jax.stages.Wrapped,
        reference: Reference | None,
        params: Any,
        mesh: Mesh,
    ) -> None:
        """compute: jitted, see `rlhf_grpo.objective.reader`. params: the policy's, to compile for their placement."""
        self.compute, self.reference, self.mesh = compute, reference, mesh
        self.moves = config.sync_ref_model
        self.names = values_read(config, reference=reference is not None)
        self._params, self._compiler = params, BackgroundCompiler()

    def compile(self, shapes: Sequence[Packed]) -> None:
        """Start to compile, in the background, for empty micro-batches of these shapes."""
        for batch in shapes if self.names else ():
            lowered = self.compute.lower(self._params, abstract_rows(self.mesh, batch))
            self._compiler.compile(batch.rows.tokens.shape, lowered)
        self._params = None  # training donates them

    def read(
        self,
        packed: Sequence[Sequence[Packed]],
        rollout: Rollout,
        prompt_sizes: NDArray[np.int64],
        params: Any,
    ) -> dict[str, NDArray[np.float32]]:
        """Return {name: float32 [N, C]} over the tokens of the packed micro-batches; 0 for all others.

        prompt_sizes: int64 [N], tokens of each completion's prompt. params: the policy's, as they are now.
        """
        out = {name: np.zeros(rollout.samples.tokens.shape, np.float32) for name in self.names}
        for batch in (batch for minibatch in packed for batch in minibatch):
            placed, at = put_rows(self.mesh, batch), locate(batch, prompt_sizes)
            self._compiler.wait(batch.rows.tokens.shape)
            values: dict[str, np.ndarray] = {}
            if self.reference is not None:
                values["ref_logps"] = fetch_array(self.compute(self.reference.params, placed)[0])
            if "old_logps" in out or "entropies" in out:
                values["old_logps"], values["entropies"] = (
                    fetch_array(x) for x in self.compute(params, placed)
                )
            for name, kept in out.items():
                kept[at.completion, at.token] = values[name][at.row, at.column]
        return out

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint keeps: the reference, where it moves."""
        return self.reference.snapshot() if self.moves and self.reference is not None else {}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put back what `snapshot` returned."""
        if self.moves and self.reference is not None:
            self.reference.restore(arrays)
