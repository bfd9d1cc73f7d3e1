"""Pairwise losses: published values, gradients, extremes, and every registered loss against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_reward import pairwise_loss
from rlhf_reward.losses import BradleyTerry, Conservative, Hinge, Squared

from rlhf_core import LossOutput
from rlhf_core.errors import InputError

CHOSEN, REJECTED = np.array([2.0, 0.5, -1.0]), np.array([1.0, 1.5, -1.0])
MARGIN = np.array([0.5, 0.0, 1.0])


@pytest.mark.parametrize(
    ("margin", "coefficient", "expected"),
    [
        (None, None, 0.7732235185),
        (MARGIN, None, 1.0335334531),
        (None, 0.01, 0.8298901852),
        (None, 0.1, 1.3398901852),
        (None, 0.0, 0.7732235185),
    ],
)
def test_published_values(margin, coefficient, expected):
    loss, metrics = pairwise_loss(CHOSEN, REJECTED, margin, center_rewards_coefficient=coefficient)
    assert loss.shape == ()
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(expected, abs=3e-7)
    expected_metrics = {
        "accuracy": 1 / 3,  # a tie is not a win
        "ties": 1 / 3,
        "margin": 0.0,
        "min_reward": -1.0,
        "mean_reward": 0.5,
        "max_reward": 2.0,
    }
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(expected_metrics, abs=1e-7)


def test_another_published_case():
    chosen, rejected, margin = [1, 0.2, -0.5], [0.5, 0.4, -1], [0.1, 0, 1]
    plain, metrics = pairwise_loss(chosen, rejected)
    assert float(plain) == pytest.approx(0.58210, abs=1e-5)
    assert float(pairwise_loss(chosen, rejected, margin)[0]) == pytest.approx(0.76174, abs=1e-5)
    centred = pairwise_loss(chosen, rejected, center_rewards_coefficient=0.1)[0]
    assert float(centred - plain) == pytest.approx(0.1620, abs=1e-4)
    assert float(metrics["accuracy"]) == pytest.approx(2 / 3)


def test_a_column_of_margins_does_not_broadcast():
    flat = pairwise_loss(CHOSEN, REJECTED, MARGIN)[0]
    assert float(pairwise_loss(CHOSEN, REJECTED, MARGIN[:, None])[0]) == float(flat)


def test_gradient():
    slope = jax.grad(lambda c: pairwise_loss(c, REJECTED)[0])(jnp.asarray(CHOSEN, jnp.float32))
    assert np.asarray(slope) == pytest.approx([-0.08964714, -0.24368619, -0.16666667], abs=1e-7)


@pytest.mark.parametrize(("difference", "loss", "slope"), [(100.0, 0.0, 0.0), (-100.0, 100.0, -1.0)])
def test_large_differences_are_finite(difference, loss, slope):
    value, gradient = jax.value_and_grad(lambda c: pairwise_loss(c, jnp.zeros(1))[0])(jnp.array([difference]))
    assert float(value) == pytest.approx(loss, abs=1e-6)
    assert float(gradient[0]) == pytest.approx(slope, abs=1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("component", "formula"),
    [
        (BradleyTerry(), lambda d: -np.log(sigmoid(d))),
        (Conservative(0.3), lambda d: -0.7 * np.log(sigmoid(d)) - 0.3 * np.log(sigmoid(-d))),
        (Hinge(), lambda d: np.maximum(0, 1 - d)),
        (Squared(0.25), lambda d: (d - 2) ** 2),
    ],
    ids=lambda x: type(x).__name__,
)
def test_every_loss_against_float64(component, formula):
    draw = np.random.default_rng(0)
    chosen, rejected, margin = draw.normal(size=(3, 50))
    loss = pairwise_loss(chosen, rejected, margin, loss=component, center_rewards_coefficient=0.3)[0]
    expected = (formula(chosen - rejected - margin) + 0.3 * (chosen + rejected) ** 2).mean()
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_a_loss_by_name_and_its_own_metrics():
    named = pairwise_loss(CHOSEN, REJECTED, MARGIN, loss="hinge")[0]
    assert float(named) == pytest.approx(np.maximum(0, 1 - (CHOSEN - REJECTED - MARGIN)).mean())

    def exponential(inputs):
        return LossOutput(jnp.exp(inputs.rejected - inputs.chosen), {"chosen_squared": inputs.chosen**2})

    _, metrics = pairwise_loss(CHOSEN, REJECTED, loss=exponential)
    assert float(metrics["function/chosen_squared"]) == pytest.approx((CHOSEN**2).mean())
    with pytest.raises(InputError, match=r"no pairwise loss named 'bradley_tery'.*bradley_terry"):
        pairwise_loss(CHOSEN, REJECTED, loss="bradley_tery")
