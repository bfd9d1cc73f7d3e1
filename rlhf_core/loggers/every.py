"""Let a logger hear of some of the logged updates only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_core.plugins.hooks import hookimpl

if TYPE_CHECKING:
    from rlhf_core.stage import Stage


def every(logger: Any, steps: int) -> Any:
    """Make a logger hear of every `steps`-th update, of evaluations, and of the last row of a stage; return it."""
    step_end, stage_end = (_caller(logger, name) for name in ("rlhf_step_end", "rlhf_stage_end"))
    unheard: list[dict[str, Any]] = []

    @hookimpl
    def rlhf_step_end(stage: Stage, step: int, metrics: Mapping[str, float]) -> None:
        unheard[:] = [{"stage": stage, "step": step, "metrics": metrics}]
        if step % steps == 0 or any(name.startswith("eval_") for name in metrics):
            step_end(**unheard.pop())

    @hookimpl
    def rlhf_stage_end(stage: Stage, error: BaseException | None) -> None:
        if unheard:
            step_end(**unheard.pop())
        stage_end(stage=stage, error=error)

    for method in (rlhf_step_end, rlhf_stage_end):
        object.__setattr__(logger, method.__name__, method)  # also of a frozen dataclass
    return logger


def _caller(logger: Any, name: str) -> Callable[..., None]:
    """Return a hook of a logger that takes any argument; one that does nothing where the logger lacks it."""
    hook = getattr(logger, name, None)
    if hook is None:
        return lambda **given: None
    known = inspect.signature(hook).parameters
    return lambda **given: hook(**{key: value for key, value in given.items() if key in known})
