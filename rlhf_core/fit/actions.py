"""Actions: what happens at the start of a run, after some of its updates, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from rlhf_core.fit.values import UpdateValues
    from rlhf_core.state import TrainState

Place: TypeAlias = Literal["move", "keep", "log", "measure", "report", "compare", "watch", "show", "save"]
ORDER: tuple[Place, ...] = get_args(Place)
"""The order of what is due after one update; see `fit`."""
UNTIMED = ("measure", "show")
"""Places whose time does not count as that of the updates."""


@dataclass
class Moment:
    """A point of a run at which actions are due.

    step: the updates done. starts: whether the run begins here, before its first update. ends: whether it ends here.
    metrics: of this step, so far: those of a logged step and what actions returned. values: what the action asked for.
    """

    step: int
    _state: TrainState | None = field(repr=False)
    starts: bool = False
    ends: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    values: UpdateValues | None = None
    improved: bool = False
    """Whether the evaluation of this step is the best so far."""
    reason: str | None = None
    """Why the run must stop, see `stop`."""

    @property
    def state(self) -> TrainState:
        """Return the state after `step` updates. Actions that take values have none: a later update changes it."""
        if self._state is None:
            raise RuntimeError("an action that takes values comes one update late and has no state")
        return self._state

    def stop(self, reason: str | None) -> None:
        """End the run once this action is done: the state is saved, and the reason becomes the error; None: go on."""
        self.reason = reason


@dataclass(frozen=True)
class When:
    """The moments at which most actions are due: before the first update, after every so many, after the last one."""

    every: int | None = None
    start: bool = False
    end: bool = False

    def __call__(self, at: Moment) -> bool:
        if at.starts:
            return self.start
        return (at.ends and self.end) or bool(self.every and at.step % self.every == 0)


@dataclass(frozen=True)
class Action:
    """Something that happens after some updates, whose loss and gradients are known to be finite by then.

    when: a number: after every so many updates; or a function of the moment that tells whether the action is due, such
        as `lambda at: at.ends`.
    run: is called with the moment: `at.step`, the updates done; `at.state`; `at.starts` and `at.ends`, whether the run
        does here; `at.metrics`, of this step so far. It may return metrics, which are logged with those of the step.
    place: which of the actions that are due come first: "move", what changes what later updates read, such as a
        reference; "measure", what returns metrics, such as an evaluation; "watch", what reads the metrics of the step,
        `at.metrics`, and may end the run with `at.stop(reason)`; "show", what shows completions.
    values: {name: "token" or "sequence"} of the objective's values that `run` gets as `at.values`. It is then called
        when the next update has begun, and cannot read the state; metrics that it returns are those of the update.
    name, bytes: of what it takes per device while it runs, for forecasts.
    """

    when: int | Callable[[Moment], bool]
    run: Callable[[Moment], Mapping[str, float] | None]
    place: Place = "measure"
    values: Mapping[str, Literal["token", "sequence"]] = field(default_factory=dict)
    name: str = ""
    bytes: int = 0

    def __post_init__(self) -> None:
        if self.place not in ORDER:
            raise ValueError(f"place={self.place!r} is none of {', '.join(ORDER)}")
        wrong = set(self.values.values()) - {"token", "sequence"}
        if wrong:
            raise ValueError(f'values: {", ".join(sorted(wrong))} is neither "token" nor "sequence"')

    def due(self, at: Moment) -> bool:
        """Return whether the action runs at this moment."""
        when = self.when if callable(self.when) else When(self.when)
        return when(at)
