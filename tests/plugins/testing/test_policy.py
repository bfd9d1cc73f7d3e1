"""The kit for policy losses finds each defect, and only that; our losses have none."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import pytest

from rlhf_core import POLICY_LOSS, LossOutput, PolicyInputs, plugins
from rlhf_core.errors import InputError
from rlhf_core.testing import check_policy_loss

CALLS = itertools.count()
NAMES = plugins.load().registry.names(POLICY_LOSS)


def good(inputs: PolicyInputs) -> jnp.ndarray:
    ratio = jnp.exp(inputs.logps - inputs.old_logps)
    return -jnp.minimum(ratio * inputs.advantages, jnp.clip(ratio, 0.8, 1.2) * inputs.advantages)


@dataclass
class NotFrozen:
    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(good(inputs))


@dataclass(frozen=True, eq=False)
class EqualToItselfOnly:
    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(good(inputs))


@dataclass(frozen=True)
class UnknownAggregation:
    aggregation: ClassVar[str] = "tokens"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(good(inputs))


def averaged(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs).mean())


def bare(inputs: PolicyInputs) -> Any:
    return good(inputs)


def half(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs).astype(jnp.bfloat16))


def averaged_metric(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs), {"advantage": inputs.advantages.mean()})


def infinite_metric(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs), {"log": jnp.log(0.0 * inputs.logps)})


def noisy(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs) * (1 + 3e-6 * (next(CALLS) % 2)))


def infinite_far_away(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(jnp.where(jnp.abs(inputs.logps - inputs.old_logps) > 30, jnp.inf, good(inputs)))


def root_of_a_square(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs) + 0.01 * jnp.sqrt(jnp.square(inputs.logps - inputs.old_logps)))


def sum_of_all_tokens(inputs: PolicyInputs) -> LossOutput:
    every = dataclasses.replace(inputs, mask=jnp.ones_like(inputs.mask))
    return LossOutput(good(inputs) * (1 + 0.01 * every.sequence_sum(inputs.old_logps)))


def by_the_width(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs) * (2.0 if inputs.mask.shape[1] % 7 else 1.0))


def centred_over_the_batch(inputs: PolicyInputs) -> LossOutput:
    mask = inputs.mask
    mean = (jnp.where(mask != 0, inputs.advantages, 0) * mask).sum() / jnp.maximum(mask.sum(), 1)
    return LossOutput(good(dataclasses.replace(inputs, advantages=inputs.advantages - 0.1 * mean)))


def mean_of_the_row(inputs: PolicyInputs) -> LossOutput:
    mask, difference = inputs.mask, inputs.logps - inputs.old_logps
    total = jnp.where(mask != 0, difference, 0).sum(1, keepdims=True)
    ratio = jnp.exp(total / jnp.maximum(mask.sum(1, keepdims=True), 1)) * jnp.ones_like(mask)
    return LossOutput(-ratio * inputs.advantages)


def uphill(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(-good(inputs))


def without_gradient(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(-inputs.advantages)


def branching(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs) if inputs.advantages.sum() < 1e9 else inputs.logps)


def needs_a_reference(inputs: PolicyInputs) -> LossOutput:
    return LossOutput(good(inputs) + 0.01 * (inputs.logps - inputs.ref_logps))  # type: ignore[operator]


MUTANTS: list[tuple[str, Callable[..., Any]]] = [
    ("component", NotFrozen),
    ("component", UnknownAggregation),
    ("hash", EqualToItselfOnly),
    ("output", averaged),
    ("output", bare),
    ("dtype", half),
    ("metrics", averaged_metric),
    ("metrics", infinite_metric),
    ("repeatable", noisy),
    ("finite value", infinite_far_away),
    ("finite gradient", root_of_a_square),
    ("mask", sum_of_all_tokens),
    ("padding", by_the_width),
    ("rows", centred_over_the_batch),
    ("packing", mean_of_the_row),
    ("direction", uphill),
    ("direction", without_gradient),
    ("jit", branching),
    ("optional inputs", needs_a_reference),
]


@pytest.mark.parametrize(("name", "loss"), MUTANTS, ids=[loss.__name__ for _, loss in MUTANTS])
def test_the_defect_is_found(name: str, loss: Any, failures: Any) -> None:
    assert set(found := failures(check_policy_loss, loss)) == {name}, found


def test_several_defects_are_reported_at_once(failures: Any) -> None:
    found = failures(
        check_policy_loss, lambda inputs: LossOutput(-mean_of_the_row(inputs).loss.astype(jnp.bfloat16))
    )
    assert set(found) == {"dtype", "packing", "direction"}


def test_what_is_said_has_numbers_and_a_way_out(failures: Any) -> None:
    assert failures(check_policy_loss, half) == {"dtype": "the loss is bfloat16; return float32"}
    said = failures(check_policy_loss, mean_of_the_row)["packing"]
    assert "15 of 15 values change by up to " in said
    assert "inputs.sequence_mean" in said
    said = failures(check_policy_loss, branching)["jit"]
    assert "TracerBoolConversionError" in said
    assert f"{__file__.rpartition('/')[2]} line " in said


def test_an_input_error_may_ask_for_an_option(failures: Any) -> None:
    def asks(inputs: PolicyInputs) -> LossOutput:
        if inputs.ref_logps is None:
            raise InputError("this loss needs a reference: give kl.beta")
        return needs_a_reference(inputs)

    assert failures(check_policy_loss, asks) == {}


@pytest.mark.parametrize("name", NAMES)
def test_built_in_components_pass(name: str) -> None:
    check_policy_loss(plugins.load().registry.get(POLICY_LOSS, name))


@pytest.mark.parametrize(
    "options", [{"importance_sampling_level": "sequence"}, {"delta": 2.0, "dual_clip": 3.0}]
)
def test_with_options(options: dict[str, Any]) -> None:
    check_policy_loss(plugins.load().registry.get(POLICY_LOSS, "dapo", **options))
