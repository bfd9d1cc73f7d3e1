"""Evaluation during training, whose failure does not end the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rlhf_core.errors import InputError, RunError, Stopped, error_line, warn
from rlhf_core.fit.actions import Action, Moment, When
from rlhf_core.metrics import Metric, fetch_metrics, merge
from rlhf_core.models.finite import nonfinite_weights
from rlhf_core.packing.rows import Packed
from rlhf_core.reading import compute_batches, say_if_slow
from rlhf_core.runtime.agreement import any_process
from rlhf_core.step import loss_metrics

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.step import Loss, Objective

HERE = str(Path(__file__).parent)
EVALUATION = "evaluation"
"""The name of the action that `evaluation` makes."""


def evaluation(
    evaluate: Callable[[TrainState], dict[str, float]], config: TrainerConfig, stage: Stage
) -> Action:
    """Make the action that evaluates every `evaluation_steps` updates, at the end, and where asked at the start.

    Its metrics are logged with the prefix `eval_`; an error after the first update becomes a warning.
    """
    first = config.eval_on_start or config.metric_for_best_model is not None

    def run(at: Moment) -> dict[str, float]:
        with say_if_slow(stage.say, f"evaluating after update {at.step}"):
            return evaluate_or_warn(evaluate, at, stage.name)

    return Action(When(config.evaluation_steps, start=first, end=True), run, "measure", name=EVALUATION)


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
    forward = jax.jit(partial(_loss_and_metrics, objective))

    def evaluate(state: TrainState) -> dict[str, float]:
        total: dict[str, Metric] = {}
        params = stored(state.params)
        for _, (loss, metrics) in compute_batches(lambda batch: forward(params, batch), mesh, batches(), say):
            total = merge(total, {**metrics, **loss_metrics(loss)})
        fetched = fetch_metrics(total)
        several = sum(value for name, value in fetched.items() if name.startswith("loss/"))
        return {"loss": several, **fetched}

    return evaluate


def _loss_and_metrics(objective: Objective, params: Any, batch: Packed) -> tuple[Loss, Mapping[str, Metric]]:
    loss, metrics, *_ = objective(params, batch)
    return loss, metrics


def evaluate_or_warn(
    evaluate: Callable[[TrainState], dict[str, float]], at: Moment, stage: str
) -> dict[str, float]:
    """Call `evaluate` with the state of a moment; return nothing, with a warning, where it fails.

    A loss that is not finite is such an error before the first update, and a warning after it: the metrics are kept.
    Errors before the first update are raised: nothing is lost yet, and wrong settings show before hours of training.
    With several processes only RunError and InputError become warnings, since all processes raise those; any other
    error may leave the other processes in the middle of a computation, and is raised.
    """
    failure: Exception | None = None
    metrics: dict[str, float] = {}
    try:
        metrics = {f"eval_{name}": value for name, value in evaluate(at.state).items()}
        _require_finite_loss(metrics, at, stage)
    except Stopped:
        raise
    except Exception as error:
        if at.starts or (jax.process_count() > 1 and not isinstance(error, RunError | InputError)):
            raise
        failure = error
    if not any_process(failure is not None)[0]:
        return metrics
    reason = str(failure) if isinstance(failure, RunError | InputError) else ""
    reason = reason or (
        error_line(failure, HERE) if failure else "it failed in another process; see that process's output"
    )
    warn(
        f"stage '{stage}': the evaluation after update {at.step} failed and is skipped; training continues: {reason}"
    )
    return {}


def _require_finite_loss(metrics: Mapping[str, float], at: Moment, stage: str) -> None:
    """Raise InputError or RunError, or warn after the first update, where the loss of an evaluation is not finite."""
    bad = [name for name, x in metrics.items() if name.startswith("eval_loss") and not math.isfinite(x)]
    if not bad:
        return
    problem = nonfinite_weights(at.state.model, at.state.params)
    line = f"stage '{stage}': {', '.join(bad)} after update {at.step} is not finite: " + (
        problem
        or "the model's weights are finite, but its outputs for some rows of eval_data, or their loss, are not"
    )
    if at.starts:
        raise InputError(line) if problem else RunError(line)
    warn(f"{line}; it is null in metrics.jsonl and not compared with other evaluations")
