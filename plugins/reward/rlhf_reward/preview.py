"""A few held-out pairs with both scores at every evaluation: for reading while the model learns."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.artifacts import write_atomic
from rlhf_reward.measures import calibration_bins, histograms

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_reward.evaluation import Evaluation

WIDTH = 88
"""Characters of a text on the console; samples/ holds all of it."""


class Preview:
    """An evaluation that also shows pairs, the same ones every time, evenly spread over those it scores.

    DIR/samples/evaluation-NNNNNN.jsonl, after update NNNNNN: `prompt`, what both texts begin with, `chosen` and
    `rejected`, as the model reads them, special tokens included; `chosen_score`, `rejected_score`, `margin`, reward
    units; `row`, where the pair comes from.

    DIR/evaluations/NNNNNN.json, of all pairs: `step`; `scores`, their histograms; `calibration`, its bins.
    """

    def __init__(self, evaluate: Evaluation, tokenizer: Any, stage: Stage, count: int) -> None:
        self.evaluate, self.stage = evaluate, stage
        scored = len(evaluate.margins)
        self.shown = np.linspace(0, scored - 1, min(count, scored)).astype(int).tolist()
        self.texts = [self._texts(i, tokenizer) for i in self.shown]

    def __call__(self, state: TrainState) -> dict[str, float]:
        metrics = self.evaluate(state)
        if self.stage.is_main:
            step, scores = int(state.step), self.evaluate.scores(state)
            self._keep(step, scores)
            if self.shown:
                self._show(step, scores)
        return metrics

    def _texts(self, i: int, tokenizer: Any) -> dict[str, str]:
        pair = self.evaluate.pairs.pairs[i]
        chosen, rejected = (tokenizer.decode(ids.tolist()) for ids in (pair.chosen, pair.rejected))
        alike = (a == b for a, b in zip(chosen, rejected, strict=False))
        shared = sum(1 for _ in takewhile(bool, alike))
        return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}

    def _keep(self, step: int, scores: np.ndarray) -> None:
        """Nothing of scores that are not finite: there is no histogram of them, and the run is about to say so."""
        if not np.isfinite(scores).all():
            return
        chosen, rejected = scores[:, 0].astype(np.float64), scores[:, 1].astype(np.float64)
        found = {
            "step": step,
            "scores": histograms(chosen, rejected),
            "calibration": calibration_bins(chosen - rejected),
        }
        write_atomic(self.stage.dir / "evaluations" / f"{step:06d}.json", json.dumps(found) + "\n")

    def _show(self, step: int, scores: np.ndarray) -> None:
        lines = []
        for i, texts in zip(self.shown, self.texts, strict=True):
            place, (chosen, rejected) = self.evaluate.pairs.where(i), map(float, scores[i])
            numbers = {"chosen_score": chosen, "rejected_score": rejected}
            row = {"row": place, **texts, **numbers, "margin": float(self.evaluate.margins[i])}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            self.stage.say(f"{place}  {_cut(texts['prompt'], end=True)}")
            self.stage.say(f"  chosen   {chosen:8.3f}  {_cut(texts['chosen'])}")
            self.stage.say(f"  rejected {rejected:8.3f}  {_cut(texts['rejected'])}")
        write_atomic(self.stage.dir / "samples" / f"evaluation-{step:06d}.jsonl", "".join(lines))


def _cut(text: str, *, end: bool = False) -> str:
    """One line of its beginning, or of its end."""
    line = " ".join(text.split())
    if len(line) <= WIDTH:
        return line
    return f"…{line[1 - WIDTH :]}" if end else f"{line[: WIDTH - 1]}…"
