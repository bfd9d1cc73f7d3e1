"""Log-probabilities of a rollout's tokens under the policy of its start and under the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core.fit import TokenReader
from rlhf_core.rollouts import Reading

if TYPE_CHECKING:
    from rlhf_core.packing import Layout, Packed, Tree
    from rlhf_core.training import Reference
    from rlhf_grpo.config import GRPOConfig


Logps: TypeAlias = Callable[[Any, "Packed"], tuple[jax.Array, jax.Array]]
"""(params, batch) → log-probabilities and entropies, nats, float32 [rows, trained]."""


def read_values(
    logps: Logps, names: Sequence[str], params: Mapping[str, Any], batch: Packed
) -> dict[str, jax.Array]:
    """Compute the named values per trained token, {name: float32 [rows, trained]}; params: by policy."""
    # What is not returned is not computed: the compiler leaves it out.
    old, entropies = logps(params["policy"], batch)
    every = {"old_logps": old, "entropies": entropies}
    if "reference" in params:
        every["ref_logps"] = logps(params["reference"], batch)[0]
    return {name: every[name] for name in names}


class PolicyReader:
    """Reads rollouts with the policy of their start and with the reference, as far as the config needs that.

    names: of what `read` returns: `old_logps` where the policy moves during a rollout, `ref_logps`, `entropies`.
    """

    def __init__(
        self, config: GRPOConfig, logps: Logps, reference: Reference | None, layout: Layout, mesh: Any
    ) -> None:
        self.reference = reference
        self.names = (
            *(("old_logps",) if config.updates_per_rollout > 1 else ()),
            *(("ref_logps",) if reference is not None else ()),
            *(("entropies",) if config.top_entropy_quantile < 1 else ()),
        )
        self._reader = TokenReader(partial(read_values, logps, self.names), layout, mesh)

    def compile(self, params: Any) -> None:
        """Start to compile in the background, for a policy that is placed like `params`."""
        if self.names:
            self._reader.compile(self._policies(params))

    def read(self, trees: Sequence[Tree], params: Any) -> dict[str, list[NDArray[np.float32]]]:
        """Return {name: a value per trained token of every branch}. params: the policy's, as they are now."""
        values: dict[str, list[NDArray[np.float32]]] = self._reader(self._policies(params), trees)
        return values

    def _policies(self, params: Any) -> dict[str, Any]:
        return {"policy": params, **({} if self.reference is None else {"reference": self.reference.params})}

    @property
    def reading(self) -> Reading | None:
        """What a compiler needs to know of `read`; None where nothing is read."""
        policy = ("parameters", "frozen parameters") if {"old_logps", "entropies"} & set(self.names) else ()
        # A reference shares the frozen parameters.
        reference = ("reference", "frozen parameters") if "ref_logps" in self.names else ()
        return Reading(self._reader, self._policies, (*policy, *reference)) if self.names else None

    def at_reference(self, params: Any) -> bool:
        """Return whether the policy is the reference, so that their KL is 0. params: the policy's, as they are now."""
        return self.reference is not None and self.reference.equals(params)
