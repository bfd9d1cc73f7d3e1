"""Evaluation on held-out pairs: the loss and metrics of training, and metrics of all scores together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core import PairInputs
from rlhf_core.artifacts import write_atomic
from rlhf_core.fit import EvaluationMetrics
from rlhf_core.metrics import fetch_metrics
from rlhf_core.objective import sequence_scores
from rlhf_reward.metrics import calibration_bins, histograms, measures

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.data import Examples
    from rlhf_core.models import Model
    from rlhf_core.training import Context, HeldOut
    from rlhf_reward.objective import Measure


class ScoreEvaluation:
    """Compute the metrics of held-out pairs, each counted once, from the state.

    Scores are gathered on the host and measured together, so that packing, batch size and mesh change nothing but
    rounding. The result is cached for the same parameters.
    """

    def __init__(
        self,
        pairs: Examples,
        held_out: HeldOut,
        model: Model,
        measure: Measure,
        own_metrics: Callable[..., dict[str, float]] = lambda scores, others: {},
    ) -> None:
        """held_out: the first of the pairs. Their column `subset` gives the metrics `accuracy/SUBSET`.

        own_metrics: further metrics of the scores, float32 [pairs, 2]; it is also given the other metrics.
        """
        self.own_metrics = own_metrics
        count = len(held_out.trees)
        self.pairs, self.stored = pairs, model.as_stored
        self.margins = pairs.values["margin"][:count].astype(np.float32)
        self.lengths = pairs.sequence_lengths[:count] - held_out.trees.prefixes[:, None]
        self.subsets = [None if x is None or x == "" else str(x) for x in pairs.column("subset")[:count]]
        self._score = held_out.reader(partial(sequence_scores, model.definition))
        self._measure = jax.jit(measure)
        self._cached: tuple[Any, NDArray[np.float32], dict[str, float]] | None = None
        self._whole = False

    def __call__(self, state: TrainState) -> EvaluationMetrics:
        scores, found = self._measured(state)
        if not self._whole:
            found |= self.own_metrics(scores, found)
            self._whole = True
        values = {"chosen": scores[:, 0], "rejected": scores[:, 1]}
        return EvaluationMetrics.of(found, self.pairs.where, values)

    def known(self, state: TrainState) -> dict[str, float]:
        """Return the metrics, with further ones only where an evaluation of this state had them."""
        return self._measured(state)[1]

    def scores(self, state: TrainState) -> NDArray[np.float32]:
        """Score the chosen and the rejected sequence of each pair, float32 [pairs, 2], reward units."""
        return self._measured(state)[0]

    def _measured(self, state: TrainState) -> tuple[NDArray[np.float32], dict[str, float]]:
        if self._cached is None or self._cached[0] is not state.params:
            self._cached, self._whole = None, False  # frees the previous arrays first
            scores = self._score(self.stored(state.params)).reshape(-1, 2)
            self._cached = state.params, scores, self._metrics(scores)
        return self._cached[1:]

    def _metrics(self, scores: NDArray[np.float32]) -> dict[str, float]:
        chosen, rejected = scores[:, 0], scores[:, 1]
        # JAX arrays, as in training: a loss may use what NumPy's lack, such as `.at`.
        pairs = PairInputs(*map(jnp.asarray, (chosen, rejected, self.margins)))
        loss, metrics, _ = self._measure(pairs, np.ones(len(scores), bool))
        found = fetch_metrics({**metrics, "loss": loss})
        return found | measures(chosen, rejected, self.lengths, self.subsets)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop values that JSON cannot hold, such as a correlation with a constant."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


WIDTH = 88
"""Characters of a text shown on the console; samples/ has the whole text."""


class Preview:
    """Evaluate, and show the same pairs every time, evenly spread over those that are scored.

    DIR/samples/evaluation-NNNNNN.jsonl, after update NNNNNN: `prompt`, the shared beginning of both texts; `chosen` and
    `rejected`, as the model reads them, special tokens included; `chosen_score`, `rejected_score`, `margin`, reward
    units; `row`, the name of the pair's row.

    DIR/evaluations/NNNNNN.json also has, over all pairs: `scores`, their histograms; `calibration`, its bins.
    """

    def __init__(self, evaluate: ScoreEvaluation, tokenizer: Any, context: Context, count: int) -> None:
        self.evaluate, self.stage = evaluate, context.stage
        scored = len(evaluate.margins)
        self.shown = np.linspace(0, scored - 1, min(count, scored)).astype(int).tolist()
        self.texts = [self._texts(i, tokenizer) for i in self.shown]

    def __call__(self, state: TrainState) -> EvaluationMetrics:
        found = self.evaluate(state)
        scores = self.evaluate.scores(state)
        if self.stage.is_main and self.shown:
            self._show(int(state.step), scores)
        return EvaluationMetrics(found, found.rows, _summary(scores))

    def _texts(self, i: int, tokenizer: Any) -> dict[str, str]:
        sequences = self.evaluate.pairs.sequences
        chosen, rejected = (tokenizer.decode(sequences[side][i].tolist()) for side in ("chosen", "rejected"))
        alike = (a == b for a, b in zip(chosen, rejected, strict=False))
        shared = sum(1 for _ in takewhile(bool, alike))
        return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}

    def _show(self, step: int, scores: np.ndarray) -> None:
        rows = []
        for i, texts in zip(self.shown, self.texts, strict=True):
            place = self.evaluate.pairs.where(i)
            chosen, rejected = map(float, scores[i])
            numbers = {"chosen_score": chosen, "rejected_score": rejected}
            rows.append({"row": place, **texts, **numbers, "margin": float(self.evaluate.margins[i])})
            self.stage.say(f"{place}  {_cut(texts['prompt'], end=True)}")
            self.stage.say(f"  chosen   {chosen:8.3f}  {_cut(texts['chosen'])}")
            self.stage.say(f"  rejected {rejected:8.3f}  {_cut(texts['rejected'])}")
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(self.stage.dir / "samples" / f"evaluation-{step:06d}.jsonl", text)
        self.stage.hook.rlhf_samples(stage=self.stage, step=step, name="evaluation", rows=rows)


def _summary(scores: np.ndarray) -> dict[str, Any]:
    """Summarise scores for the report; nothing where some are not finite, which the run reports."""
    if not np.isfinite(scores).all():
        return {}
    chosen, rejected = scores[:, 0].astype(np.float64), scores[:, 1].astype(np.float64)
    return {"scores": histograms(chosen, rejected), "calibration": calibration_bins(chosen - rejected)}


def _cut(text: str, *, end: bool = False) -> str:
    """Shorten a text to one line of its beginning, or of its end."""
    line = " ".join(text.split())
    if len(line) <= WIDTH:
        return line
    return f"…{line[1 - WIDTH :]}" if end else f"{line[: WIDTH - 1]}…"
