"""Find the rows of an update that made its loss or gradient not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.errors import RunError
from rlhf_core.mesh import put_rows
from rlhf_core.models.finite import first_nonfinite

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.fit.batches import Update
    from rlhf_core.packing.rows import Packed
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.step import Programs


def find_nonfinite_rows(
    steps: Programs, state: TrainState, update: Update, shapes: Sequence[Packed], mesh: Mesh
) -> list[str]:
    """Name the rows whose own loss or gradient is not finite, with their examples.

    shapes: an empty micro-batch of every shape; each row is computed alone in one, with the compiled programs.
    """
    empty = {batch.rows.tokens.shape: batch for batch in shapes}
    culprits: list[str] = []
    counts = steps.count(state, update.batches)
    for number, batch in enumerate(update.batches):
        blank = empty[batch.rows.tokens.shape]
        for row in range(len(batch.example)):
            examples = sorted({int(i) for i in batch.example[row] if i >= 0})
            if not examples:
                continue
            alone = jax.tree.map(lambda x, b, r=row: _keep_row(x, b, r), batch, blank)
            done = steps.accumulate(state, put_rows(mesh, alone), None, number, counts)
            leaves = jax.tree.leaves((done.loss, done.grads))
            if not all(np.isfinite(np.asarray(jax.device_get(jnp.sum(x)))) for x in leaves):
                names = ", ".join(update.where(i) for i in examples)
                rows = batch.rows
                read = (x[row][None] for x in (rows.tokens, rows.positions, rows.visible_until))
                begins = (
                    "" if culprits else first_nonfinite(state.model, state.params, *map(jnp.asarray, read))
                )
                begins = f", and begins in the output of {begins}" if begins else ""
                culprits.append(f"row {row} of micro-batch {number} ({names}){begins}")
    return culprits


def nonfinite_error(stage: Stage, step: int, culprits: Sequence[str]) -> RunError:
    """Make the error for update `step` + 1: the rows that it comes from, and what to do."""
    listed = "; ".join(culprits[:5]) + (f"; and {len(culprits) - 5} more" if len(culprits) > 5 else "")
    return RunError(
        f"stage '{stage.name}': loss or gradient of update {step + 1} is not finite. "
        f"It comes from {listed or 'the sum of its rows, each of which is finite by itself'}. "
        f"The state before it is kept in {stage.dir / 'checkpoints'}. "
        + ("Lower learning_rate, set max_grad_norm, look" if step else "Look")
        + " at these examples, or check a custom loss with rlhf_core.testing."
    )


def _keep_row(x: np.ndarray, blank: np.ndarray, row: int) -> np.ndarray:
    out = np.array(blank)
    out[row] = x[row]
    return out
