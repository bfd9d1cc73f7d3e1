"""Evaluations during training: their metrics, the values of held-out rows, and failures that do not end the run."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.artifacts import write_atomic
from rlhf_core.errors import InputError, RunError, Stopped, error_line, warn
from rlhf_core.fit.actions import Action, Moment, When
from rlhf_core.loggers.jsonl import strict
from rlhf_core.mesh import replicated_sharding
from rlhf_core.metrics import Metric, fetch_metrics, merge
from rlhf_core.models.finite import nonfinite_weights
from rlhf_core.packing.rows import Packed
from rlhf_core.reading import compute_batches, require_shape, say_if_slow
from rlhf_core.runtime.agreement import any_process
from rlhf_core.step import chosen_values, loss_metrics

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from rlhf_core.config import TrainerConfig
    from rlhf_core.stage import Stage
    from rlhf_core.state import TrainState
    from rlhf_core.step import Objective

HERE = str(Path(__file__).parent)
PerRow: TypeAlias = Literal["token", "sequence"]
"""Whether an objective's values are numbers of trained tokens or of sequences."""
EVALUATION = "evaluation"
"""The name of the action that `evaluation` makes."""
_PLACE = re.compile(r"(.*) row (\d+)")
"""How messages name a row: its file and its number there."""


def evaluation(
    evaluate: Callable[[TrainState], dict[str, float]], config: TrainerConfig, stage: Stage
) -> Action:
    """Make the action that evaluates every `evaluation_steps` updates, at the end, and where asked at the start.

    Its metrics are logged with the prefix `eval_`; an error after the first update becomes a warning.
    """
    first = config.eval_on_start or config.metric_for_best_model is not None

    def run(at: Moment) -> dict[str, float]:
        with say_if_slow(stage.say, f"evaluating after update {at.step}"):
            return evaluate_or_warn(evaluate, at, stage)

    return Action(When(config.evaluation_steps, start=first, end=True), run, "measure", name=EVALUATION)


class EvaluationMetrics(dict[str, float]):
    """Metrics of an evaluation, with the values of every held-out row: what an evaluation returns that has both.

    rows: {"row": its number in the data, …values}. extra: what else evaluations/NNNNNN.json has.
    """

    def __init__(
        self,
        metrics: Mapping[str, float],
        rows: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(metrics)
        self.rows = rows
        self.extra = extra or {}

    @classmethod
    def of(
        cls,
        metrics: Mapping[str, float],
        where: Callable[[int], str],
        values: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
    ) -> EvaluationMetrics:
        """Attach values to the first rows of the data. where: names row i, as `Examples.where` does.

        values: float [rows] by name; what is not finite is None. Rows of several files also have a `file`.
        """
        columns = {name: np.asarray(column).tolist() for name, column in values.items()}
        rows: list[dict[str, Any]] = []
        for i in range(max(map(len, columns.values()), default=0)):
            place = _PLACE.fullmatch(where(i))
            row: dict[str, Any] = (
                {"row": i + 1} if place is None else {"row": int(place[2]), "file": place[1]}
            )
            rows.append(row | {name: _number(column[i]) for name, column in columns.items()})
        if len({row.get("file") for row in rows}) == 1:
            for row in rows:
                row.pop("file", None)
        return cls(metrics, rows, extra)

    @classmethod
    def joined(cls, sets: Mapping[str, Mapping[str, float]]) -> EvaluationMetrics:
        """Join evaluations by the names of their sets, which begin their metrics and are in their rows' `set`."""
        metrics: dict[str, float] = {}
        rows: list[Mapping[str, Any]] = []
        extra: dict[str, Any] = {}
        for name, found in sets.items():
            metrics |= {f"{name}_{metric}": value for metric, value in found.items()}
            if isinstance(found, EvaluationMetrics):
                rows += [{"set": name, **row} for row in found.rows]
                extra = {**found.extra, **extra}
        return cls(metrics, rows, extra)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def evaluator(
    objective: Objective,
    mesh: Mesh,
    batches: Callable[[], Sequence[Packed]],
    *,
    where: Callable[[int], str] = lambda i: f"row {i + 1}",
    values: Mapping[str, PerRow] | None = None,
    stored: Callable[[Any], Any] = lambda params: params,
    say: Callable[[str], None] | None = None,
) -> Callable[[TrainState], EvaluationMetrics]:
    """Make a function from the state to the objective's loss and metrics, without a gradient.

    batches: returns what it reads, as `pack_numbered` numbers the rows. where: names a row.
    values: of the objective, {name: "token" or "sequence"}: their means over a row's tokens, by weight, or sequences
        become the row's values.
    stored: converts parameters to those that are saved, such as `model.as_stored`.
    say: prints the progress of an evaluation that takes longer than a few seconds, such as `stage.say`.
    """
    # A function of its own: jit would reuse programs of the same objective, which may read globals that have changed.
    per = values or {}
    forward = jax.jit(
        partial(_with_values, objective, tuple(per.items()), replicated_sharding(mesh) if per else None)
    )

    def evaluate(state: TrainState) -> EvaluationMetrics:
        total: dict[str, Metric] = {}
        found: list[tuple[Packed, Mapping[str, Any]]] = []
        params = stored(state.params)
        for batch, result in compute_batches(lambda batch: forward(params, batch), mesh, batches(), say):
            loss, metrics, of_rows = result
            total = merge(total, {**metrics, **loss_metrics(loss)})
            found.append((batch, of_rows))
        fetched = fetch_metrics(total)
        several = sum(value for name, value in fetched.items() if name.startswith("loss/"))
        fetched = {"loss": several, **fetched}
        return EvaluationMetrics.of(fetched, where, row_means(found, per) if per else {})

    return evaluate


def _with_values(
    objective: Objective,
    per: tuple[tuple[str, PerRow], ...],
    gathered: NamedSharding | None,
    params: Any,
    batch: Packed,
) -> Any:
    """Call an objective; every process gets the values of these names of all rows.

    per: hashable, so that an equal evaluation is not traced again.
    """
    loss, metrics, *values = objective(params, batch)
    if not per:
        return loss, metrics, {}
    chosen = chosen_values(values[0] if values else {}, dict(per))
    for name, kind in per:
        require_shape(name, kind, jnp.shape(chosen[name]), batch, groups=True)
    return loss, metrics, jax.lax.with_sharding_constraint(dict(chosen), gathered)


def row_means(
    found: Sequence[tuple[Packed, Mapping[str, Any]]], per: Mapping[str, PerRow]
) -> dict[str, np.ndarray]:
    """Average what an objective returned by the rows of the data, {name: float64 [rows]}; NaN where nothing is trained.

    found: micro-batches, and arrays by name: [rows, trained] "token", which count by the tokens' weights, or [rows,
    sequences] "sequence", which may also have a number for each group of sequences, such as a pair.
    """
    count = max((int(batch.example.max(initial=-1)) for batch, _ in found), default=-1) + 1
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, count)))
    for batch, values in found:
        for name, array in values.items():
            of_kind = _of_tokens if per[name] == "token" else _of_sequences
            owner, value, weight = of_kind(batch, array)
            totals[name][0] += np.bincount(owner, value * weight, count)
            totals[name][1] += np.bincount(owner, weight, count)
    with np.errstate(invalid="ignore"):
        return {name: sums / weights for name, (sums, weights) in totals.items()}


def _of_tokens(batch: Packed, array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the example of every trained token, its value and its weight."""
    row, column = np.nonzero(batch.trained >= 0)
    token = batch.trained[row, column]
    owner = batch.example[row, np.asarray(batch.rows.sequence)[row, token]]
    weight = np.asarray(batch.rows.weight, np.float64)[row, token]
    return owner, array[row, column].astype(np.float64), weight


def _of_sequences(batch: Packed, array: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the example of every sequence, or group of sequences, its value and 1."""
    example = batch.example[:, :: batch.example.shape[1] // array.shape[1]]
    used = example >= 0
    return example[used], array[used].astype(np.float64), np.ones(int(used.sum()))


def write_evaluation(
    directory: Path, count: int, metrics: Mapping[str, float], found: Mapping[str, float]
) -> None:
    """Write DIRECTORY/evaluations/NNNNNN.json. metrics: of what was `found`, by the names in metrics.jsonl."""
    rows = found.rows if isinstance(found, EvaluationMetrics) else ()
    extra = found.extra if isinstance(found, EvaluationMetrics) else {}
    content = {"step": count, "rows": list(rows), "metrics": strict(metrics), **extra}
    write_atomic(directory / "evaluations" / f"{count:06d}.json", json.dumps(content, allow_nan=False) + "\n")


def evaluate_or_warn(
    evaluate: Callable[[TrainState], dict[str, float]], at: Moment, stage: Stage
) -> dict[str, float]:
    """Call `evaluate` with the state of a moment, and write what it found; where it fails, warn and return nothing.

    A loss that is not finite is such an error before the first update, and a warning after it: the metrics are kept.
    Errors before the first update are raised: nothing is lost yet, and wrong settings show before hours of training.
    With several processes only RunError and InputError become warnings, since all processes raise those; any other
    error may leave the other processes in the middle of a computation, and is raised.
    """
    failure: Exception | None = None
    metrics: dict[str, float] = {}
    try:
        found = evaluate(at.state)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        _require_finite_loss(metrics, at, stage.name)
        if stage.is_main:
            write_evaluation(stage.dir, at.step, metrics, found)
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
        f"stage '{stage.name}': the evaluation after update {at.step} failed and is skipped; training continues: "
        f"{reason}"
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
