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


def test_a_second_published_case():
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


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.logaddexp(0, x)


LOSSES = pytest.mark.parametrize(
    ("component", "formula", "slope"),
    [
        (BradleyTerry(), lambda d: softplus(-d), lambda d: -sigmoid(-d)),
        (
            Conservative(0.3),
            lambda d: 0.7 * softplus(-d) + 0.3 * softplus(d),
            lambda d: -0.7 * sigmoid(-d) + 0.3 * sigmoid(d),
        ),
        (Hinge(), lambda d: np.maximum(0, 1 - d), lambda d: -1.0 * (d < 1)),
        (Squared(0.25), lambda d: (d - 2) ** 2, lambda d: 2 * (d - 2)),
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


@pytest.mark.parametrize(("difference", "loss", "slope"), [(100.0, 0.0, 0.0), (-100.0, 100.0, -1.0)])
def test_large_differences_are_finite(difference, loss, slope):
    value, gradient = jax.value_and_grad(lambda c: pairwise_loss(c, jnp.zeros(1))[0])(jnp.array([difference]))
    assert float(value) == pytest.approx(loss, abs=1e-6)
    assert float(gradient[0]) == pytest.approx(slope, abs=1e-6)


def test_what_the_options_mean():
    """Smoothing by 0 is Bradley-Terry; by ε the best difference is log((1 − ε) / ε); τ sets the squared loss's."""

    def slope(component, difference):
        return float(jax.grad(lambda c: pairwise_loss(c, jnp.zeros(1), loss=component)[0])(difference)[0])

    plain = pairwise_loss(CHOSEN, REJECTED, MARGIN)[0]
    assert float(pairwise_loss(CHOSEN, REJECTED, MARGIN, loss=Conservative(0.0))[0]) == float(plain)
    assert slope(Conservative(0.2), jnp.log(jnp.array([4.0]))) == pytest.approx(0, abs=1e-7)
    assert slope(Squared(0.1), jnp.array([5.0])) == pytest.approx(0, abs=1e-6)
    assert slope(Hinge(), jnp.array([1.001])) == 0
    assert slope(Hinge(), jnp.array([0.999])) == -1


def test_a_loss_with_options_by_name():
    table = {"name": "conservative", "label_smoothing": 0.3}
    found = pairwise_loss(CHOSEN, REJECTED, MARGIN, loss=table)[0]
    assert float(found) == float(pairwise_loss(CHOSEN, REJECTED, MARGIN, loss=Conservative(0.3))[0])
    for wrong, message in [
        (
            {"name": "conservative", "label_smoothing": 0.5},
            r"label_smoothing: expected a number below 0.5, got 0.5",
        ),
        ({"name": "squared", "tau": 0}, r"tau: expected a number above 0, got 0"),
        ({"name": "hinge", "margin": 1}, r"margin: unknown option for pairwise loss 'hinge'"),
        ({"label_smoothing": 0.1}, r"name: missing"),
    ]:
        with pytest.raises(InputError, match=message):
            pairwise_loss(CHOSEN, REJECTED, loss=wrong)


def test_a_loss_by_name_and_its_own_metrics():
    named = pairwise_loss(CHOSEN, REJECTED, MARGIN, loss="hinge")[0]
    assert float(named) == pytest.approx(np.maximum(0, 1 - (CHOSEN - REJECTED - MARGIN)).mean())

    def exponential(inputs):
        return LossOutput(jnp.exp(inputs.rejected - inputs.chosen), {"chosen_squared": inputs.chosen**2})

    _, metrics = pairwise_loss(CHOSEN, REJECTED, loss=exponential)
    assert float(metrics["function/chosen_squared"]) == pytest.approx((CHOSEN**2).mean())
    with pytest.raises(InputError, match=r"no pairwise loss named 'bradley_tery'.*bradley_terry"):
        pairwise_loss(CHOSEN, REJECTED, loss="bradley_tery")
