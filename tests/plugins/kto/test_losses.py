"""The losses in float64 NumPy from the papers' formulas: value and gradient, weights, metrics, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_kto import KTO_LOSS, KTOInputs
from rlhf_kto.objective import completion_loss

from rlhf_core import installed_registry

BETA, KL, WEIGHTS = 0.3, 1.7, (1.5, 0.75)


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


FORMULAS = {
    "kto": lambda r, good: np.where(good, 1 - sigmoid(BETA * (r - KL)), 1 - sigmoid(BETA * (KL - r))),
    "apo_zero_unpaired": lambda r, good: np.where(good, 1 - sigmoid(BETA * r), sigmoid(BETA * r)),
}


@pytest.fixture(scope="module")
def drawn():
    """Log-probabilities, those of the reference, labels, and which completions are present; float64."""
    rng = np.random.default_rng(0)
    logps, reference = (np.float32(-30 + 6 * rng.normal(size=40)).astype(float) for _ in range(2))
    return logps, reference, rng.random(40) < 0.6, rng.random(40) < 0.8


def measured(name, logps, reference, good, present):
    """(the loss, as a sum and a count; the metrics)."""
    loss = installed_registry().get(KTO_LOSS, name)
    arrays = (jnp.asarray(x, jnp.float32) for x in (logps, reference))
    inputs = KTOInputs(*arrays, jnp.asarray(good), jnp.full(len(good), KL if name == "kto" else 0.0), BETA)
    return completion_loss(loss, inputs, jnp.asarray(present), name=name, weights=WEIGHTS)


@pytest.mark.parametrize("name", FORMULAS)
def test_value_gradient_and_metrics_equal_the_formulas(name, drawn):
    logps, reference, good, present = drawn
    weight = np.where(good, *WEIGHTS)

    def formula(x):
        return weight * FORMULAS[name](x - reference, good)

    value, metrics = measured(name, *drawn)
    assert float(value.result()) == pytest.approx(formula(logps)[present].mean(), rel=2e-6)
    assert float(value.count) == present.sum()
    found = jax.grad(lambda x: measured(name, x, *drawn[1:])[0].result())(jnp.asarray(logps, jnp.float32))
    slope = (formula(logps + 1e-6) - formula(logps - 1e-6)) / 2e-6
    np.testing.assert_allclose(found, np.where(present, slope, 0) / present.sum(), rtol=2e-5, atol=1e-9)
    r, desirable, others = logps - reference, present & good, present & ~good
    gain = (r - KL if name == "kto" else r) * np.where(good, 1, -1)
    expected = {
        "rewards/chosen": BETA * r[desirable].mean(),
        "rewards/rejected": BETA * r[others].mean(),
        "rewards/accuracies": (gain > 0)[present].mean(),
        "logps/chosen": logps[desirable].mean(),
        "logps/rejected": logps[others].mean(),
    } | ({"kl": KL} if name == "kto" else {})
    assert {k: float(x.result()) for k, x in metrics.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_finite_far_away(name, size, drawn):
    value, slope = jax.value_and_grad(lambda x: measured(name, x, *drawn[1:])[0].result())(jnp.full(40, size))
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
