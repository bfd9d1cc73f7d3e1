"""Attributes that a kind declares: read by one function, and checked when a component is registered."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest

from rlhf_core import ADVANTAGE, POLICY_LOSS, Kind, LossOutput, PolicyInputs
from rlhf_core.errors import InputError
from rlhf_core.plugins import Registry


@dataclass(frozen=True)
class Base:
    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(-inputs.logps * inputs.advantages)


def test_other_constants_are_refused_in_every_kind_that_jit_closes_over() -> None:
    @dataclass(frozen=True)
    class Advantage:
        scale: ClassVar[str] = "none"

        def __call__(self, inputs: Any) -> Any: ...

    with pytest.raises(InputError, match="nothing reads its attribute 'scale'"):
        Registry().add(ADVANTAGE, "mine", Advantage)


def test_what_is_no_attribute_of_its_own_is_left_alone() -> None:
    @dataclass(frozen=True)
    class Rich(Base):
        aggregation: ClassVar[str] = "fixed_length"
        temperature: float = 1.0
        derived: float = dataclasses.field(init=False, default=0.0)
        _private: ClassVar[int] = 3
        helper: ClassVar[Any] = staticmethod(jnp.tanh)

        @property
        def double(self) -> float:
            return 2 * self.temperature

        @classmethod
        def make(cls) -> Any:
            return cls()

    registry = Registry()
    registry.add(POLICY_LOSS, "rich", Rich)
    made = registry.get(POLICY_LOSS, "rich", temperature=2.0)
    assert POLICY_LOSS.attribute(made, "aggregation") == "fixed_length"
    assert POLICY_LOSS.attribute(made, "importance_sampling_level") == "token"


def with_options(
    inputs: PolicyInputs, scale: float = 1.0, importance_sampling_level: str = "sequence"
) -> LossOutput:
    return LossOutput(-inputs.logps * scale)


with_options.aggregation = "sequence_mean"  # type: ignore[attr-defined]


def test_a_function_keeps_its_attributes_when_options_are_given() -> None:
    registry = Registry()
    registry.add(POLICY_LOSS, "mine", with_options)
    for options, level in (
        ({}, "sequence"),
        ({"scale": 2.0}, "sequence"),
        ({"importance_sampling_level": "sequence_token"}, "sequence_token"),
    ):
        made = registry.get(POLICY_LOSS, "mine", **options)
        assert POLICY_LOSS.attribute(made, "aggregation") == "sequence_mean"
        assert POLICY_LOSS.attribute(made, "importance_sampling_level") == level
    assert registry.check(POLICY_LOSS, "mine", {"importance_sampling_level": "token_means"})


def test_kinds_with_attributes_can_be_keys() -> None:
    kind: Kind[Any] = Kind("shape", attributes={"side": ("left", "right")})
    assert {kind: 1}[Kind("shape", attributes={"side": ("left", "right")})] == 1
    assert kind != Kind("shape")
