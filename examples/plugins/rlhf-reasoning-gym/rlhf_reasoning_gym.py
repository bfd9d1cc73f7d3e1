"""Tasks of reasoning-gym: `environment = { name = "reasoning_gym", task = "chain_sum" }` in a GRPO stage."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import numpy as np

from rlhf_core import InputError, Turn

FORM = "Give your final answer between <answer> and </answer>."
AGAIN = "That is not right. Try again."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """Ask a question of a task, and score the answer with the task's own verifier, 0 to 1.

    A row may have `task`, the name of a dataset of reasoning-gym; `config`, a table of that dataset's options; and
    `seed`, which with them decides the question. Without one, the episodes of every group get a question of their own.
    """

    def __init__(
        self, task: str | None = None, config: Mapping[str, Any] | None = None, tries: int = 1
    ) -> None:
        """task, config: of rows that have none. tries: answers per question; the right one or the last is scored."""
        if tries < 1:
            raise ValueError(f"tries: expected 1 or more, got {tries}")
        self.task, self.config, self.tries = task, dict(config or {}), tries
        tasks = _factory().DATASETS
        if task is not None and task not in tasks:
            raise InputError(_unknown(task, tasks))

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, Any]]:
        """Make the question of a row. Raises InputError for a task that reasoning-gym does not have."""
        task, drawn, factory = row.get("task") or self.task, row.get("seed"), _factory()
        if task is None:
            raise InputError('the row has no `task`; add one, such as "chain_sum", or give it as an option')
        if task not in factory.DATASETS:
            raise InputError(_unknown(task, factory.DATASETS))
        seed = seed if drawn is None else int(drawn)
        with _global_seed(seed):
            options = {"seed": seed, "size": 1, **self.config, **(row.get("config") or {})}
            self.questions = factory.create_dataset(task, **options)
            self.entry = self.questions[0]
        self.tried = 0
        return [{"role": "user", "content": f"{self.entry['question']}\n\n{FORM}"}]

    def step(self, completion: Mapping[str, Any]) -> Turn:
        """Score an answer, or ask for another one. Metrics: `solved`, and `tries` that it took."""
        self.tried += 1
        score = self._score(completion["content"])
        if score < 1 and self.tried < self.tries:
            return Turn([{"role": "user", "content": AGAIN}])
        return Turn(reward=score, done=True, metrics={"solved": float(score >= 1), "tries": self.tried})

    def _score(self, text: str) -> float:
        answers = ANSWER.findall(text)
        if not answers:
            return 0.0
        with _global_seed(0):
            try:
                return float(self.questions.score_answer(answer=answers[-1].strip(), entry=self.entry))
            except Exception:  # verifiers parse answers, and not all expect what policies write
                return 0.0


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed the global random numbers, which some tasks draw from, and put them back."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _factory() -> Any:
    """Import reasoning-gym when it is needed, which takes seconds; return its module with the tasks."""
    try:
        importlib.import_module("reasoning_gym")  # registers the tasks
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise InputError(
            f"environment 'reasoning_gym' needs reasoning-gym ({error}); type: pip install reasoning-gym"
        ) from error


def _unknown(task: str, tasks: Mapping[str, Any]) -> str:
    near = get_close_matches(task, tasks, n=1)
    meant = f" Did you mean '{near[0]}'?" if near else ""
    return f"reasoning-gym has no task '{task}'.{meant}"
