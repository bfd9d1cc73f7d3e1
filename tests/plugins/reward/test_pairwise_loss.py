"""Pairwise losses: published values, gradients, extremes, and every registered loss against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_reward import pairwise_loss

from rlhf_core import LossOutput

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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


LOSSES = pytest.mark.parametrize(
    ("component", "formula", "slope"),
    [
        ("bradley_terry", lambda d: softplus(-d), lambda d: -sigmoid(-d)),
        (
            {"name": "conservative", "label_smoothing": 0.3},
            lambda d: 0.7 * softplus(-d) + 0.3 * softplus(d),
            lambda d: -0.7 * sigmoid(-d) + 0.3 * sigmoid(d),
        ),
        ("hinge", lambda d: np.maximum(0, 1 - d), lambda d: -1.0 * (d < 1)),
        ({"name": "squared", "tau": 0.25}, lambda d: (d - 2) ** 2, lambda d: 2 * (d - 2)),
    ],
    ids=["bradley_terry", "conservative", "hinge", "squared"],
)


@LOSSES
@pytest.mark.parametrize("coefficient", [pytest.param(None, marks=pytest.mark.long), 0.3])
def test_every_loss_and_its_gradient_against_float64(component, formula, slope, coefficient):
    """Ordinary differences, and of 100 either way."""
    draw = np.random.default_rng(0)
    chosen, rejected, margin = draw.normal(size=(3, 50)) * 2
    chosen[:2], rejected[:2], margin[:2] = (60, -60), (-40, 40), 0
    d, weight = chosen - rejected - margin, coefficient or 0.0
    assert (d[:2] == (100, -100)).all()
    assert (d < 1).any()
    assert (d > 2).any()

    def loss(c, r, m):
        return pairwise_loss(c, r, m, loss=component, center_rewards_coefficient=coefficient)[0]

    arrays = [jnp.asarray(x, jnp.float32) for x in (chosen, rejected, margin)]
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))(*arrays)
    expected = (formula(d) + weight * (chosen + rejected) ** 2).mean()
    assert float(value) == pytest.approx(expected, rel=1e-6)
    centring = 2 * weight * (chosen + rejected)
    for found, right in zip(gradients, (slope(d) + centring, -slope(d) + centring, -slope(d)), strict=True):
        np.testing.assert_allclose(found, right / 50, rtol=2e-5, atol=2e-8)


def test_a_loss_has_metrics_of_its_own():
    def exponential(inputs):
        return LossOutput(jnp.exp(inputs.rejected - inputs.chosen), {"chosen_squared": inputs.chosen**2})

    _, metrics = pairwise_loss(CHOSEN, REJECTED, loss=exponential)
    assert float(metrics["function/chosen_squared"]) == pytest.approx((CHOSEN**2).mean())
