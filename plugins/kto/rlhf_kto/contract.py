"""The contract of KTO losses: what they take, what they return, and the kind under which they are registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhf_core import Kind

if TYPE_CHECKING:
    import jax

    from rlhf_core import LossOutput


@dataclass(frozen=True)
class KTOInputs:
    """One element per completion, [completions]. Log-probabilities are sums over a completion's tokens, nats.

    logps, ref_logps: float32, under the policy, differentiable; under the reference, without a gradient.
    desirable: bool, the label.
    kl: float32, nats, at least 0, without a gradient: the estimate of the policy's KL to the reference, the same for
        all completions of an update; 0 where the loss does not read it.
    beta: β, above 0: how strongly the policy is held to the reference.
    """

    logps: jax.Array
    ref_logps: jax.Array
    desirable: jax.Array
    kl: jax.Array
    beta: float

    @property
    def ratio(self) -> jax.Array:
        """log π − log π_ref, nats; β times it is the implicit reward."""
        return self.logps - self.ref_logps


class KTOLoss(Protocol):
    """Compute a value per completion, and metrics per completion, which are averaged and logged under the loss's name.

    A public class attribute `reads_kl = False` says that it does not read the estimate of the KL: updates then need no
    second pass.
    """

    def __call__(self, inputs: KTOInputs, /) -> LossOutput: ...


KTO_LOSS: Kind[KTOLoss] = Kind("kto loss", ("inputs",), constant=True, attributes={"reads_kl": (True, False)})
