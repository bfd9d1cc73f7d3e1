"""Evaluate during training, so that a failure does not end the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core.errors import InputError, RunError, Stopped, error_line, warn
from rlhf_core.metrics import Metric, fetch_metrics, merge
from rlhf_core.models.finite import nonfinite_weights
from rlhf_core.packing.rows import Packed
from rlhf_core.reading import compute_batches
from rlhf_core.runtime.agreement import any_process
from rlhf_core.step import loss_metrics

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.state import TrainState
    from rlhf_core.step import Objective

HERE = str(Path(__file__).parent)


def evaluator(
    objective: Objective,
    mesh: Mesh,
    batches: Callable[[], Sequence[Packed]],
    *,
    stored: Callable[[Any], Any] = lambda params: params,
    say: Callable[[str], None] | None = None,
) -> Callable[[TrainState], dict[str, float]]:
    """Make a function from the state to the objective's loss and metrics, without a gradient.

    batches: returns what it reads. stored: converts parameters to those that are saved, such as `model.as_stored`.
    say: prints the progress of an evaluation that takes longer than a few seconds, such as `stage.say`.
    """
    # A function of its own: jit would reuse programs of the same objective, which may read globals that have changed.
    forward = jax.jit(partial(objective))

    def evaluate(state: TrainState) -> dict[str, float]:
        total: dict[str, Metric] = {}
        params = stored(state.params)
        for _, (loss, metrics) in compute_batches(lambda batch: forward(params, batch), mesh, batches(), say):
            total = merge(total, {**metrics, **loss_metrics(loss)})
        fetched = fetch_metrics(total)
        several = sum(value for name, value in fetched.items() if name.startswith("loss/"))
        return {"loss": several, **fetched}

    return evaluate


def evaluate_or_warn(
    evaluate: Callable[[TrainState], dict[str, float]], state: TrainState, count: int, stage: str
) -> dict[str, float] | None:
    """Call `evaluate` after `count` updates; return None, with a warning, where it fails.

    A loss that is not finite is such an error before the first update, and a warning after it: the metrics are kept.
    Errors before the first update are raised: nothing is lost yet, and wrong settings show before hours of training.
    With several processes only RunError and InputError become warnings, since all processes raise those; any other
    error may leave the other processes in the middle of a computation, and is raised.
    """
    failure: Exception | None = None
    metrics: dict[str, float] = {}
    try:
        metrics = {f"eval_{name}": value for name, value in evaluate(state).items()}
        _require_finite_loss(metrics, state, count, stage)
    except Stopped:
        raise
    except Exception as error:
        if count == 0 or (jax.process_count() > 1 and not isinstance(error, RunError | InputError)):
            raise
        failure = error
    if not any_process(failure is not None)[0]:
        return metrics
    reason = str(failure) if isinstance(failure, RunError | InputError) else ""
    reason = reason or (
        error_line(failure, HERE) if failure else "it failed in another process; see that process's output"
    )
    warn(
        f"stage '{stage}': the evaluation after update {count} failed and is skipped; training continues: {reason}"
    )
    return None


def _require_finite_loss(metrics: Mapping[str, float], state: TrainState, count: int, stage: str) -> None:
    """Raise InputError or RunError, or warn after the first update, where the loss of an evaluation is not finite."""
    bad = [name for name, x in metrics.items() if name.startswith("eval_loss") and not math.isfinite(x)]
    if not bad:
        return
    problem = nonfinite_weights(state.model, state.params)
    line = f"stage '{stage}': {', '.join(bad)} after update {count} is not finite: " + (
        problem
        or "the model's weights are finite, but its outputs for some rows of eval_data, or their loss, are not"
    )
    if count == 0:
        raise InputError(line) if problem else RunError(line)
    warn(f"{line}; it is null in metrics.jsonl and not compared with other evaluations")
