"""Scores of rows, texts and conversations by a reward model, read as it was trained."""

from __future__ import annotations

import copy
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from rlhf_http.fields import MOST_ROWS, BadRequest, Classify, Score, Texts, require_short, texts_in

from rlhf_core.data.records import from_memory
from rlhf_core.data.table import Records
from rlhf_core.runtime.terminal import number
from rlhf_core.scoring import ScoredPart, Scorer
from rlhf_serve.engine import Engine
from rlhf_serve.opening import ServedScorer

MOST_LAYOUTS = 64
"""Shapes of batches that are compiled for, at most: each request has the one that `rlhf score` would choose."""
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def rows_of(body: Score) -> list[dict[str, Any]]:
    """Make rows of what `/score` is given. Raises BadRequest."""
    if body.rows is not None:
        rows = body.rows
    else:
        given = [
            each
            for each in SIDES
            if getattr(body, each[0]) is not None and getattr(body, each[1]) is not None
        ]
        if not given:
            raise BadRequest(
                "give rows: [{prompt, completion} | {messages} | {prompt, chosen, rejected}], or text_1 and text_2, or "
                "queries and documents",
                param="rows",
            )
        first, second = (_as_list(getattr(body, name)) for name in given[0])
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            raise BadRequest(
                f"{given[0][0]} and {given[0][1]}: {len(first)} and {len(second)} texts; give as many, or one first",
                param=given[0][0],
            )
        rows = [{"prompt": prompt, "completion": text} for prompt, text in zip(first, second, strict=True)]
    if not rows:
        raise BadRequest("rows: is empty", param="rows")
    if len(rows) > MOST_ROWS:
        raise BadRequest(
            f"rows: {len(rows):,} are more than {MOST_ROWS:,}; send several requests", param="rows"
        )
    return [_as_chat(row) for row in rows] if body.chat else rows


def _as_list(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    prompt = row.get("prompt")
    return {**row, "prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else dict(row)


class Scoring:
    """One request's scores, computed part by part in the engine's thread."""

    def __init__(self, served: ServedScorer) -> None:
        self.served = served
        self.scorer: Scorer = copy.copy(served.scorer)
        self.warned: list[str] = []
        known = served.layouts
        self.scorer.layout = (
            max(known, key=lambda each: each.time[-1]) if len(known) >= MOST_LAYOUTS else None
        )

    def _noted(self, function: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = function()
        self.warned += [str(each.message) for each in caught]
        if self.scorer.layout is not None and self.scorer.layout not in self.served.layouts:
            self.served.layouts.append(self.scorer.layout)
        return result

    async def rows(self, engine: Engine, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """Score rows as `rlhf score` does: {"score": …} or {"chosen_score": …, "rejected_score": …}, None where a row
        has no completion. Raises InputError that names the rows at fault.
        """
        for index, row in enumerate(rows):
            require_short(texts_in(row), self.scorer.contract.max_length, f"rows.{index}")
        parts: Iterator[ScoredPart] = iter(())

        def begin() -> None:
            nonlocal parts
            parts = self.scorer.score_parts(Records([from_memory(rows, "rows")]))

        await engine.call(begin)
        scores: dict[str, list[Any]] = {}
        while (part := await engine.call(partial(self._noted, lambda: next(parts, None)))) is not None:
            for name, values in part.scores.items():
                scores.setdefault(name, []).extend(map(_cell, values))
        return scores

    async def ids(self, engine: Engine, sequences: Sequence[np.ndarray]) -> list[float | None]:
        """Score sequences of token ids, used as they are."""
        values = await engine.call(partial(self._noted, partial(self.scorer.score_ids, sequences)))
        return [number(value) for value in values]


def _cell(score: Any) -> Any:
    if score is None:
        return None
    return [number(x) for x in score] if np.ndim(score) else number(score)


async def score(body: Score, served: ServedScorer, engine: Engine) -> dict[str, Any]:
    """Answer `/score`."""
    scoring = Scoring(served)
    scores = await scoring.rows(engine, rows_of(body))
    count = len(next(iter(scores.values())))
    data = [
        {"index": i, "object": "score", **{name: values[i] for name, values in scores.items()}}
        for i in range(count)
    ]
    return _answer("score", served, data, scoring)


async def classify(body: Classify, served: ServedScorer, engine: Engine) -> dict[str, Any]:
    """Answer `/classify`: the score is the only class, without an activation unless it is asked for."""
    scoring = Scoring(served)
    given = body.input
    if (given is None) == (body.messages is None):
        raise BadRequest("give either input or messages", param="input")
    rows: list[Any] = [body.messages] if given is None else _inputs(given)
    if not rows:
        raise BadRequest("input: is empty", param="input")
    if len(rows) > MOST_ROWS:
        raise BadRequest(
            f"input: {len(rows):,} are more than {MOST_ROWS:,}; send several requests", param="input"
        )
    first = rows[0]
    if isinstance(first, list) and first and isinstance(first[0], int):
        values: list[Any] = await scoring.ids(engine, [np.asarray(row, np.int32) for row in rows])
    else:
        column = "text" if isinstance(first, str) else "messages"
        scores = await scoring.rows(engine, [{column: row} for row in rows])
        values = scores["score"]
    if body.use_activation or body.activation:
        values = [None if value is None else 1 / (1 + float(np.exp(-value))) for value in values]
    data = [
        {"index": i, "object": "classification", "label": "LABEL_0", "probs": [value], "num_classes": 1}
        for i, value in enumerate(values)
    ]
    return _answer("classify", served, data, scoring)


def _inputs(given: Any) -> list[Any]:
    alone = isinstance(given, str) or (given and isinstance(given[0], int))
    return [given] if alone else given


def _answer(kind: str, served: ServedScorer, data: Any, scoring: Scoring) -> dict[str, Any]:
    answer = {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": served.name,
        "data": data,
    }
    return {**answer, "warnings": scoring.warned} if scoring.warned else answer
