"""A loss says how it is averaged by attributes: read where it is used, whatever door it came through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_grpo import policy_loss
from rlhf_grpo.objective import Terms, combine

from rlhf_core import POLICY_LOSS, LossOutput, PolicyInputs, plugins
from rlhf_core.errors import InputError

AGGREGATIONS = {
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "cispo": "token_mean",
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "gspo": "sequence_mean",
    "gspo_token": "sequence_mean",
    "dr_grpo": "fixed_length",
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_each_loss_aggregates_as_its_paper(name: str) -> None:
    loss = plugins.load().registry.get(POLICY_LOSS, name)
    assert POLICY_LOSS.attribute(loss, "aggregation") == AGGREGATIONS[name]


def inputs() -> PolicyInputs:
    draw = np.random.default_rng(0)
    logps = jnp.asarray(-draw.exponential(1.0, (3, 4)), jnp.float32)
    mask = jnp.asarray([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], jnp.float32)
    return PolicyInputs(logps, logps, jnp.ones((3, 4)), mask, ref_logps=logps)


@dataclass(frozen=True)
class Wrong:
    aggregation: ClassVar[str] = "sequence"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(inputs.logps)


@dataclass(frozen=True)
class WrongLevel:
    importance_sampling_level: str = "sentence"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(inputs.logps)


@pytest.mark.parametrize(
    ("loss", "terms"), [(Wrong(), Terms("x")), (WrongLevel(), Terms("x", 0.1, bias_correction=True))]
)
def test_a_loss_that_was_never_registered_is_refused_where_it_is_used(loss: Any, terms: Terms) -> None:
    with pytest.raises(InputError, match="it is one of"):
        combine(loss, inputs(), terms, sequences=3)


def test_policy_loss_refuses_a_level_that_nobody_has() -> None:
    given = inputs()
    with pytest.raises(InputError, match=r"'sequnce'.*Did you mean 'sequence'"):
        policy_loss(given.logps, None, given.advantages, given.mask, importance_sampling_level="sequnce")


@dataclass(frozen=True)
class Strict:
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        if self.epsilon > 1:
            raise ValueError("epsilon must be at most 1")

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(-self.epsilon * inputs.logps)


def test_policy_loss_does_not_drop_what_a_loss_of_a_plugin_objects_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = plugins.load()
    host.registry.add(POLICY_LOSS, "strict", Strict)
    monkeypatch.setattr("rlhf_grpo.functional.installed_registry", lambda: host.registry)
    given = inputs()

    def loss(**options: Any) -> float:
        return float(
            policy_loss(given.logps, None, given.advantages, given.mask, loss_type="strict", **options)[0]
        )

    assert loss(epsilon=0.4) == pytest.approx(2 * loss(epsilon=0.2))
    with pytest.raises(InputError, match="epsilon must be at most 1"):
        loss(epsilon=2.0)
    with pytest.raises(InputError, match="policy loss 'strict' has level 'token'"):
        loss(importance_sampling_level="sequence")
