"""The kit for loggers finds each defect, and only that; the built-in ones have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from rlhf_core import LOGGER, Stage, hookimpl, plugins
from rlhf_core.testing import check_logger


class Needy:
    def __init__(self, project: str) -> None:
        self.project = project


class Undecorated:
    def rlhf_step_end(self, metrics: Mapping[str, float]) -> None: ...


class Misspelt:
    @hookimpl
    def rlhf_stpe_end(self, metrics: Mapping[str, float]) -> None: ...


class Raising:
    @hookimpl
    def rlhf_artifact_saved(self, artifact: Any) -> None:
        raise KeyError(artifact.name)


class Whole:
    @hookimpl
    def rlhf_step_end(self, metrics: Mapping[str, float]) -> None:
        for value in metrics.values():
            int(value)


class Always:
    @hookimpl
    def rlhf_step_end(self, metrics: Mapping[str, float]) -> None:
        metrics["loss"]


class Fresh:
    @hookimpl
    def rlhf_stage_start(self, stage: Stage) -> None:
        (stage.dir / "log").mkdir()


@dataclass(eq=False)
class Unopened:
    rows: list[Any] | None = None

    @hookimpl
    def rlhf_step_end(self, metrics: Mapping[str, float]) -> None:
        self.rows = [*(self.rows or []), metrics]

    @hookimpl
    def rlhf_stage_end(self) -> None:
        len(self.rows)  # type: ignore[arg-type]


class Taking:
    @hookimpl
    def rlhf_step_end(self, metrics: dict[str, float]) -> None:
        metrics.pop("loss", None)


LOGGERS: list[tuple[str, Any]] = [
    ("component", Needy),
    ("hooks", Undecorated),
    ("hooks", Misspelt),
    ("events", Raising),
    ("not finite", Whole),
    ("sparse metrics", Always),
    ("going on", Fresh),
    ("failure", Unopened),
    ("inputs", Taking),
]


@pytest.mark.parametrize(("name", "logger"), LOGGERS)
def test_a_loggers_defect_is_found(name: str, logger: Any, failures: Any) -> None:
    assert set(found := failures(check_logger, logger)) == {name}, found


@pytest.mark.parametrize(
    ("name", "options"), [("console", {}), ("jsonl", {}), ("console", {"progress": "json"})]
)
def test_our_loggers_have_none(name: str, options: Any) -> None:
    check_logger(plugins.load().registry.get(LOGGER, name, **options))
