"""Both components against what they say, and against what every trainer relies on."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_spo import SPOLoss, finished_sentences

from rlhf_core import PolicyInputs
from rlhf_core.testing import check_policy_loss, check_reward


@pytest.mark.parametrize("epsilon", [0.1, 0.2])
def test_the_loss_passes_the_kit(epsilon: float) -> None:
    check_policy_loss(SPOLoss(epsilon))


def test_the_loss_is_its_formula() -> None:
    logps, old, a = np.array([[-1.0, -2.0]]), np.array([[-1.5, -1.0]]), np.array([[1.0, -2.0]])
    given = (jnp.asarray(x, jnp.float32) for x in (logps, old, a, np.ones((1, 2))))
    r = np.exp(logps - old)
    expected = -r * a + np.abs(a) * (r - 1) ** 2 / 0.4
    np.testing.assert_allclose(SPOLoss(0.2)(PolicyInputs(*given)).loss, expected, rtol=1e-6)


def test_the_reward_passes_the_kit() -> None:
    check_reward(finished_sentences)


def test_the_reward_on_texts() -> None:
    said = ["Yes. No?", "Yes. And then", "One. Two. Three. Four.", ""]
    assert finished_sentences(said) == [1.0, 0.5, 0.0, None]
