"""Metrics of the user's own, `compute_metrics` from Python and `metrics` of a file: functions of held-out scores."""

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
    """Calls functions of held-out scores and checks what they return. Without one, there are no metrics.

    functions: by the field that they are from, for messages. warn: takes one line about them.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], warn: Callable[[str], None]) -> None:
        self.functions, self.warn = functions, warn
        self._warned: set[str] = set()

    def __call__(self, values: Any, others: Mapping[str, float] | None = None) -> dict[str, float]:
        """Compute the metrics of values [examples, 2] of pairs, chosen first; names lose `eval_`, added later.

        others: the metrics of the evaluation; warns once of those that the functions' take the place of. Raises
        RunError where a function raises, returns anything but numbers by name, or a name that another returned.
        """
        own: dict[str, float] = {}
        for where, compute in self.functions.items():
            prediction = EvalPrediction(np.array(values), np.zeros(len(values), np.int32))
            try:
                found = compute(prediction)
            except (InputError, RunError, Stopped):
                raise
            except Exception as error:
                raise RunError(f"{where} {error_line(error)}") from error
            numbers = self._numbers(found, f"{where}{defined_at(compute)}")
            twice = sorted(own.keys() & numbers.keys())
            if twice:
                raise RunError(f"{where} returned {twice[0]!r}, which another function has returned, too")
            own |= numbers
            field = where.rpartition("'.")[2]
            replaced = sorted((numbers.keys() & (others or {}).keys()) - self._warned)
            if replaced:
                self._warned.update(replaced)
                names = ", ".join(replaced)
                self.warn(f"{field}: the evaluation has {names} too; logged is what {field} returned")
        return own

    def try_on(self, pairs: int) -> None:
        """Call the functions on random scores of so many pairs. Raises InputError where a run would end."""
        try:
            self(np.random.default_rng(0).normal(size=(pairs, 2)).astype(np.float32))
        except RunError as error:
            raise InputError(f"{error} (tried on random scores, before training)") from error

    def _numbers(self, found: Any, where: str) -> dict[str, float]:
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
