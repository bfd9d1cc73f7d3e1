"""The KTO trainer's loss as a plain function of log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rlhf_core.training import named_loss
from rlhf_kto.contract import KTO_LOSS, KTOInputs
from rlhf_kto.objective import completion_loss

if TYPE_CHECKING:
    import jax

    from rlhf_kto.contract import KTOLoss


def kto_loss(
    logps: Any,
    ref_logps: Any,
    label: Any,
    kl: Any = 0.0,
    *,
    beta: float = 0.1,
    loss_type: str | Mapping[str, Any] | KTOLoss = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute a KTO loss over log-probabilities, differentiable in those of the policy.

    logps, ref_logps: float32 [completions], nats, sums over a completion's tokens. label: [completions], 0 for
    undesirable ones. kl: float32 [], nats, max(0, mean log-ratio of mismatched completions). loss_type: a registered
    name, a table of the name and its options, or a component.
    Returns the mean loss, float32 [], and the metrics rewards/chosen, rewards/rejected, rewards/accuracies,
    logps/chosen, logps/rejected and, where the loss reads it, kl, float32 [] each.
    """
    name, component = named_loss(KTO_LOSS, loss_type)
    policy, reference = jnp.asarray(logps), jnp.asarray(ref_logps)
    inputs = KTOInputs(policy, reference, jnp.asarray(label) != 0, jnp.full_like(policy, kl), beta)
    weights = (desirable_weight, undesirable_weight)
    present = jnp.ones(policy.shape, bool)
    value, metrics, _ = completion_loss(component, inputs, present, name=name, weights=weights)
    return value.result(), {k: metric.result() for k, metric in metrics.items()}
