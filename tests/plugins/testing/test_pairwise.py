"""The kit for pairwise losses finds each defect, and only that; our losses have none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import PAIRWISE_LOSS, LossOutput, PairInputs, plugins
from rlhf_core.testing import check_pairwise_loss

CALLS = itertools.count()
NAMES = plugins.load().registry.names(PAIRWISE_LOSS)


def difference(inputs: PairInputs) -> jax.Array:
    return inputs.chosen - inputs.rejected - inputs.margin


def good(inputs: PairInputs) -> jax.Array:
    return -jax.nn.log_sigmoid(difference(inputs))


@dataclass
class NotFrozen:
    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(good(inputs))


@dataclass(frozen=True, eq=False)
class EqualToItselfOnly:
    def __call__(self, inputs: PairInputs) -> LossOutput:
        return LossOutput(good(inputs))


def averaged(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs).mean())


def half(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs).astype(jnp.bfloat16))


def averaged_metric(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs), {"chosen": inputs.chosen.mean()})


def noisy(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs) * (1 + 3e-6 * (next(CALLS) % 2)))


def infinite_far_away(inputs: PairInputs) -> LossOutput:
    return LossOutput(jnp.where(jnp.abs(difference(inputs)) > 1e3, jnp.inf, good(inputs)))


def root_of_a_square(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs) + 1e-6 * jnp.sqrt(jnp.square(difference(inputs) - 1e4)))


def centred_over_the_batch(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs._replace(margin=inputs.margin + 0.1 * difference(inputs).mean())))


def order_matters(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs) * jnp.linspace(1.0, 2.0, len(inputs.chosen)))


def uphill(inputs: PairInputs) -> LossOutput:
    return LossOutput(-good(inputs))


def branching(inputs: PairInputs) -> LossOutput:
    return LossOutput(inputs.chosen if inputs.margin.sum() > 1e9 else good(inputs))


def on_the_host(inputs: PairInputs) -> LossOutput:
    return LossOutput(jnp.asarray(np.logaddexp(0.0, -np.asarray(difference(inputs)))))


def as_a_number(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs) * float(inputs.margin.max() >= 0))


def without_metrics(inputs: PairInputs) -> LossOutput:
    return LossOutput(good(inputs), None)  # type: ignore[arg-type]


MUTANTS: list[tuple[str, Callable[..., Any]]] = [
    ("component", NotFrozen),
    ("hash", EqualToItselfOnly),
    ("output", averaged),
    ("dtype", half),
    ("metrics", averaged_metric),
    ("repeatable", noisy),
    ("finite value", infinite_far_away),
    ("finite gradient", root_of_a_square),
    ("pairs", centred_over_the_batch),
    ("pairs", order_matters),
    ("direction", uphill),
    ("jit", branching),
    ("jit", on_the_host),
    ("jit", as_a_number),
    ("output", without_metrics),
]


@pytest.mark.parametrize(("name", "loss"), MUTANTS, ids=[loss.__name__ for _, loss in MUTANTS])
def test_the_defect_is_found(name: str, loss: Any, failures: Any) -> None:
    assert set(found := failures(check_pairwise_loss, loss)) == {name}, found


@pytest.mark.parametrize("name", NAMES)
def test_built_in_components_pass(name: str) -> None:
    check_pairwise_loss(plugins.load().registry.get(PAIRWISE_LOSS, name))
