"""Components: what may be registered, how options are read, and messages for wrong options."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import pytest

from rlhf_core.config import Options, TrainerConfig
from rlhf_core.contracts import (
    DATASET,
    LOGGER,
    OPTIMIZER,
    POLICY_LOSS,
    REWARD,
    TRAINER,
    Trainer,
)
from rlhf_core.plugins import Registry

if TYPE_CHECKING:
    from rlhf_core.contracts import LossOutput, PolicyInputs


class Level(Enum):
    TOKEN = "token"


class Inner(Options):
    size: int = 1


SMALL = Inner()


@dataclass(frozen=True)
class Tanh:
    temperature: float = 1.0
    betas: tuple[float, ...] = (0.9,)
    limit: int | None = None
    cached: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0")

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        raise NotImplementedError


@dataclass(frozen=True)
class Child(Tanh):
    """Inherits options whose types another class declares."""

    floor: float = 0.0


@dataclass
class Reader:
    path: Path
    limit: int | None = None

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise IndexError(index)


def dapo(inputs: PolicyInputs, *, epsilon: float = 0.2, low=0.1, mode="a") -> LossOutput:
    raise NotImplementedError


def brevity(completions: Sequence[str], answer: Any, *, target: int = 40, **columns: Any) -> list[float]:
    return [-abs(len(text) - target) for text in completions]


def adamw(learning_rate: Any, b1: float = 0.9) -> tuple[Any, float]:
    return learning_rate, b1


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.add(POLICY_LOSS, "tanh", Tanh)
    registry.add(POLICY_LOSS, "dapo", dapo)
    registry.add(REWARD, "brevity", brevity)
    registry.add(OPTIMIZER, "adamw", adamw)
    return registry


# Making components


def test_a_dataclass_is_built_with_its_options(registry: Registry) -> None:
    made = registry.get(POLICY_LOSS, "tanh", temperature=2, betas=[1, 2.0], limit=None)
    assert made == Tanh(temperature=2.0, betas=(1.0, 2.0), limit=None)
    assert hash(made) == hash(Tanh(temperature=2.0, betas=(1.0, 2.0)))
    registry.add(POLICY_LOSS, "child", Child)
    assert registry.get(POLICY_LOSS, "child", floor=1, temperature=3) == Child(temperature=3.0, floor=1.0)


def test_a_function_keeps_its_options(registry: Registry) -> None:
    assert registry.get(POLICY_LOSS, "dapo") is dapo
    made = registry.get(REWARD, "brevity", target=3)
    assert isinstance(made, functools.partial)
    assert made(["four"], answer=None) == [-1]
    assert registry.get(OPTIMIZER, "adamw", b1=0.5)(1e-3) == (1e-3, 0.5)


def test_lists_become_tuples_so_that_a_component_hashes() -> None:
    @dataclass(frozen=True)
    class Loss:
        groups: list[list[int]] | None = None

        def __call__(self, inputs: Any) -> Any: ...

    registry = Registry()
    registry.add(POLICY_LOSS, "x", Loss)
    assert hash(registry.get(POLICY_LOSS, "x", groups=[[1], [2, 3]])) == hash(Loss(((1,), (2, 3))))  # type: ignore[arg-type]


def test_a_factory_is_called_even_without_options(registry: Registry) -> None:
    registry.add(DATASET, "reader", Reader)
    made = registry.get(DATASET, "reader", path="x.jsonl")
    assert made == Reader(Path("x.jsonl"))
    registry.add(LOGGER, "plain", type("Plain", (), {}))
    assert type(registry.get(LOGGER, "plain")).__name__ == "Plain"
    registry.add(DATASET, "rows", lambda size=2: list(range(size)))
    assert registry.get(DATASET, "rows") == [0, 1]
    assert registry.get(DATASET, "rows", size=3) == [0, 1, 2]


def test_a_finished_object_is_itself_and_takes_no_options(registry: Registry) -> None:
    trainer = Trainer(TrainerConfig, {"model": "language_model"}, lambda config, stage: None)
    registry.add(TRAINER, "t", trainer)
    assert registry.get(TRAINER, "t") is trainer


def test_a_jitted_function_has_the_options_of_what_it_wraps(registry: Registry) -> None:
    registry.add(POLICY_LOSS, "jitted", jax.jit(dapo))
    assert registry.check(POLICY_LOSS, "jitted", {"epsilon": 0.1}) == []
    assert registry.check(POLICY_LOSS, "jitted", {"epsilom": 0.1})[0][0] == "epsilom"


# Options


def test_a_reward_s_columns_are_no_options(registry: Registry) -> None:
    for name in ("answer", "completions", "columns"):
        assert registry.check(REWARD, "brevity", {name: 1})[0][1].startswith(
            "unknown option for reward 'brevity'"
        )
    assert registry.check(REWARD, "brevity", {"wieght": 1}, also=["weight"]) == [
        ("wieght", "unknown option for reward 'brevity'. Did you mean 'weight'?")
    ]


def test_required_options_and_things_not_made_by_a_check(registry: Registry) -> None:
    made = []

    class Rows:
        def __init__(self, path: str, limit: int = 1) -> None:
            made.append(path)

    registry.add(DATASET, "rows", Rows)
    assert registry.check(DATASET, "rows", {}) == [("path", "missing; it has no default")]
    assert registry.check(DATASET, "rows", {"path": "x"}) == []
    assert made == []
    registry.add(LOGGER, "rows", Rows)
    assert (registry.check(LOGGER, "rows", {"path": "x"}), made) == ([], ["x"])


def test_options_of_richer_types(registry: Registry) -> None:
    @dataclass(frozen=True)
    class Rich:
        inner: Inner = SMALL
        level: Level = Level.TOKEN

        def __call__(self, inputs: Any) -> Any: ...

    registry.add(POLICY_LOSS, "rich", Rich)
    assert registry.get(POLICY_LOSS, "rich", inner={"size": 2}).inner == Inner(size=2)  # type: ignore[attr-defined]
    assert registry.check(POLICY_LOSS, "rich", {"inner": {"sise": 2}}) == [
        ("inner.sise", "unknown field. Did you mean 'size'?")
    ]
