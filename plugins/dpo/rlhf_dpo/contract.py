"""The contract of DPO losses: what they take, what they return, and the kind under which they are registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhf_core import Kind

if TYPE_CHECKING:
    import jax

    from rlhf_core import LossOutput


@dataclass(frozen=True)
class DPOInputs:
    """One element per preference pair, float32 [pairs]. Log-probabilities are sums over a completion's tokens, nats.

    logps_chosen, logps_rejected: under the policy; differentiable.
    ref_logps_chosen, ref_logps_rejected: under the reference; no gradient. 0 for a loss that does not read it.
    tokens_chosen, tokens_rejected: tokens of the completion, at least 1.
    beta: β, above 0: scales the implicit rewards.
    """

    logps_chosen: jax.Array
    logps_rejected: jax.Array
    ref_logps_chosen: jax.Array
    ref_logps_rejected: jax.Array
    tokens_chosen: jax.Array
    tokens_rejected: jax.Array
    beta: float

    @property
    def ratio_chosen(self) -> jax.Array:
        """log π(chosen) − log π_ref(chosen), nats; β times it is the implicit reward."""
        return self.logps_chosen - self.ref_logps_chosen

    @property
    def ratio_rejected(self) -> jax.Array:
        """log π(rejected) − log π_ref(rejected), nats."""
        return self.logps_rejected - self.ref_logps_rejected


class DPOLoss(Protocol):
    """Compute a value per pair, and metrics per pair, which are averaged and logged under the loss's name.

    A public class attribute `reads_reference = False` says that it compares with no reference: none is then computed or
    kept, and the implicit reward is β log π.
    """

    def __call__(self, inputs: DPOInputs, /) -> LossOutput: ...


DPO_LOSS: Kind[DPOLoss] = Kind(
    "dpo loss", ("inputs",), constant=True, attributes={"reads_reference": (True, False)}
)
