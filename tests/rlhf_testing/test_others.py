"""The kits for loggers, optimizers and datasets find each defect, and only that; the built-in ones have none."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from rlhf_core import DATASET, OPTIMIZER, Stage, hookimpl, plugins
from rlhf_core.loggers import Console, JsonLines
from rlhf_core.testing import check_dataset, check_logger, check_optimizer


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


@pytest.mark.parametrize("logger", [Console, JsonLines, Console("json")])
def test_our_loggers_have_none(logger: Any) -> None:
    check_logger(logger)


def stepping(direction: Any) -> Any:
    """Make an optimizer that moves by learning_rate × direction(gradients, parameters)."""

    def make(learning_rate: Any) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            rate = learning_rate(state)
            return jax.tree.map(lambda g, x: rate * direction(g, x), updates, params), state + 1

        return optax.GradientTransformation(lambda params: jnp.int32(0), update)

    return make


good = stepping(lambda g, x: -g)


class Count(NamedTuple):
    count: Any
    label: str


def labelled(learning_rate: Any) -> optax.GradientTransformation:
    inner = good(learning_rate)

    def update(updates: Any, state: Count, params: Any = None) -> Any:
        moved, count = inner.update(updates, state.count, params)
        return moved, Count(count, state.label)

    return optax.GradientTransformation(lambda params: Count(inner.init(params), 1.5), update)  # type: ignore[arg-type]


def constant(learning_rate: Any) -> optax.GradientTransformation:
    return good(lambda count: learning_rate(0 * count))


def half(learning_rate: Any) -> optax.GradientTransformation:
    def narrow(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), updates)

    return optax.chain(good(learning_rate), optax.stateless(narrow))


def decaying(learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(good(learning_rate), optax.add_decayed_weights(-1e-3))


OPTIMIZERS: dict[str, tuple[set[str], Any]] = {
    "nothing": ({"component"}, lambda learning_rate: None),
    "branching": ({"jit"}, stepping(lambda g, x: -g if g.sum() < 1e9 else g)),
    "half": ({"shapes"}, half),
    "labelled": ({"state"}, labelled),
    "normed": ({"finite"}, stepping(lambda g, x: -g / jnp.sqrt(jnp.square(g).sum()))),
    # What moves at a rate of 0 moves at the first update of such a schedule, too.
    "decaying": ({"learning rate", "schedule"}, decaying),
    "constant": ({"schedule"}, constant),
    "uphill": ({"downhill"}, stepping(lambda g, x: g)),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_an_optimizers_defect_is_found(case: str, failures: Any) -> None:
    expected, optimizer = OPTIMIZERS[case]
    assert set(found := failures(check_optimizer, optimizer)) == expected, found


@pytest.mark.parametrize("name", plugins.load().registry.names(OPTIMIZER))
def test_our_optimizers_have_none(name: str) -> None:
    check_optimizer(plugins.load().registry.get(OPTIMIZER, name))


@dataclass
class Rows:
    rows: list[Any] = field(default_factory=lambda: [{"text": "a"}, {"text": "b"}, {"text": "c"}])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class RoundAndRound(Rows):
    def __getitem__(self, i: int) -> Any:
        return self.rows[i % len(self.rows)]


class Drawn(Rows):
    def __getitem__(self, i: int) -> Any:
        return self.rows[i] | {"seed": random.random()}


DATASETS: list[tuple[str, Any]] = [
    ("length", Rows([])),
    ("rows", Rows(["a", "b"])),
    ("ends", RoundAndRound()),
    ("repeatable", Drawn()),
    ("columns", Rows([{"text": "a"}, {"content": "b"}])),
]


@pytest.mark.parametrize(("name", "dataset"), DATASETS)
def test_a_datasets_defect_is_found(name: str, dataset: Any, failures: Any) -> None:
    assert set(found := failures(check_dataset, dataset)) == {name}, found


def test_our_datasets_have_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b", "n": [1, 2]}\n')
    check_dataset(Rows())
    check_dataset(plugins.load().registry.get(DATASET, "jsonl", path=str(path)))
