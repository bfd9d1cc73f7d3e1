"""The losses in float64 NumPy from the papers' formulas: value and gradient, weights, metrics, extremes."""

import jax
import numpy as np
import pytest
from rlhf_kto import kto_loss

BETA, KL, WEIGHTS = 0.3, 1.7, (1.5, 0.75)


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


FORMULAS = {
    "kto": lambda r, good: np.where(good, 1 - sigmoid(BETA * (r - KL)), 1 - sigmoid(BETA * (KL - r))),
    "apo_zero_unpaired": lambda r, good: np.where(good, 1 - sigmoid(BETA * r), sigmoid(BETA * r)),
}


@pytest.fixture(scope="module")
def drawn():
    """Log-probabilities, those of the reference, and labels; float64."""
    rng = np.random.default_rng(0)
    logps, reference = (np.float32(-30 + 6 * rng.normal(size=40)).astype(float) for _ in range(2))
    return logps, reference, rng.random(40) < 0.6


def ours(name, logps, reference, good):
    arrays = (np.float32(x) if isinstance(x, np.ndarray) else x for x in (logps, reference))
    weights = dict(zip(("desirable_weight", "undesirable_weight"), WEIGHTS, strict=True))
    return kto_loss(*arrays, good, KL if name == "kto" else 0.0, beta=BETA, loss_type=name, **weights)


@pytest.mark.parametrize("name", FORMULAS)
def test_value_gradient_and_metrics_equal_the_formulas(name, drawn):
    logps, reference, good = drawn
    weight = np.where(good, *WEIGHTS)

    def formula(x):
        return weight * FORMULAS[name](x - reference, good)

    value, metrics = ours(name, *drawn)
    assert float(value) == pytest.approx(formula(logps).mean(), rel=2e-6)
    found = jax.grad(lambda x: ours(name, x, *drawn[1:])[0])(np.float32(logps))
    slope = (formula(logps + 1e-6) - formula(logps - 1e-6)) / 2e-6
    np.testing.assert_allclose(found, slope / len(slope), rtol=2e-5, atol=1e-9)
    r = logps - reference
    gain = (r - KL if name == "kto" else r) * np.where(good, 1, -1)
    expected = {
        "rewards/chosen": BETA * r[good].mean(),
        "rewards/rejected": BETA * r[~good].mean(),
        "rewards/accuracies": (gain > 0).mean(),
        "logps/chosen": logps[good].mean(),
        "logps/rejected": logps[~good].mean(),
    } | ({"kl": KL} if name == "kto" else {})
    assert {k: float(x) for k, x in metrics.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_finite_far_away(name, size, drawn):
    value, slope = jax.value_and_grad(lambda x: ours(name, x, *drawn[1:])[0])(np.full(40, size, np.float32))
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
