"""The next-token loss over packed rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.metrics import Mean, Metric
from rlhf_core.objective import trained_logps, trained_weight

if TYPE_CHECKING:
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed


def objective(model: Definition, params: Any, batch: Packed) -> tuple[Mean, Mapping[str, Metric]]:
    """Compute the mean over trained tokens t of −w_t · log p(x_t | x_<t), in nats; the denominator is Σ w_t."""
    logps, entropies = trained_logps(model, params, batch, entropy=True)
    weight = trained_weight(batch)
    return Mean.of(-logps, weight), {"entropy": Mean.of(entropies, weight)}
