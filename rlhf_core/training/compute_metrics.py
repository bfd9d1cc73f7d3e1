"""Metrics of the user's own, `compute_metrics` from Python: one function for every trainer's evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError, RunError, Stopped, defined_at, error_line


class EvalPrediction(NamedTuple):
    """What `compute_metrics` is called with, by the names of transformers."""

    predictions: NDArray[Any]
    """float32 [pairs, 2]: scores, or implicit rewards, of the chosen and the rejected reply."""
    label_ids: NDArray[np.int32]
    """int32 [pairs]: which of the two is the better one, always 0."""


class OwnMetrics:
    """Calls the function of `compute_metrics` and checks what it returns. Without one, there are no metrics.

    where: the field, for messages. warn: takes one line about it.
    """

    def __init__(self, compute: Callable[..., Any] | None, where: str, warn: Callable[[str], None]) -> None:
        self.compute, self.where, self.warn = compute, where, warn
        self._warned: set[str] = set()

    def __call__(self, values: Any, others: Mapping[str, float] | None = None) -> dict[str, float]:
        """Compute the metrics of values [examples, 2] of pairs, chosen first; names lose `eval_`, added later.

        others: the metrics of the evaluation; warns once of those that the function's take the place of. Raises
        RunError where the function raises, or returns anything but numbers by name.
        """
        if self.compute is None:
            return {}
        try:
            found = self.compute(EvalPrediction(np.asarray(values), np.zeros(len(values), np.int32)))
        except (InputError, RunError, Stopped):
            raise
        except Exception as error:
            raise RunError(f"{self.where} {error_line(error)}") from error
        own = self._numbers(found)
        if twice := sorted((own.keys() & (others or {}).keys()) - self._warned):
            self._warned.update(twice)
            names = ", ".join(twice)
            self.warn(
                f"compute_metrics: the evaluation has {names} too; logged is what compute_metrics returned"
            )
        return own

    def try_on(self, pairs: int) -> None:
        """Call the function on random scores of so many pairs. Raises InputError where a run would end."""
        try:
            self(np.random.default_rng(0).normal(size=(pairs, 2)).astype(np.float32))
        except RunError as error:
            raise InputError(f"{error} (tried on random scores, before training)") from error

    def _numbers(self, found: Any) -> dict[str, float]:
        where = f"{self.where}{defined_at(self.compute)}"
        if not isinstance(found, Mapping):
            raise RunError(
                f"{where} must return numbers by name, such as {{'gap': 0.5}}; it returned {found!r:.60}"
            )
        numbers: dict[str, float] = {}
        for name, value in found.items():
            try:
                if isinstance(value, str | bytes):
                    raise TypeError
                number = float(value)
            except (TypeError, ValueError):
                raise RunError(f"{where} must return numbers; its {name!r} is {value!r:.60}") from None
            numbers[str(name).removeprefix("eval_")] = number
        return numbers
