"""The losses in float64 NumPy from the papers' formulas: value and gradient, options, extremes."""

import jax
import numpy as np
import pytest
from rlhf_dpo import dpo_loss

BETA = 0.3
LOGPS = ("logps_chosen", "logps_rejected", "ref_logps_chosen", "ref_logps_rejected")


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def ratios(p):
    return p["logps_chosen"] - p["ref_logps_chosen"], p["logps_rejected"] - p["ref_logps_rejected"]


def h(p):
    a, b = ratios(p)
    return BETA * (a - b)


def mean_ratio(p):
    a, b = ratios(p)
    return a / p["tokens_chosen"] - b / p["tokens_rejected"]


def smoothed(x, e):
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


FORMULAS = {
    "sigmoid": ("sigmoid", lambda p: -log_sigmoid(h(p))),
    "cdpo": ({"name": "sigmoid", "label_smoothing": 0.2}, lambda p: smoothed(h(p), 0.2)),
    "sigmoid_norm": ("sigmoid_norm", lambda p: -log_sigmoid(BETA * mean_ratio(p))),
    "sigmoid_norm smoothed": (
        {"name": "sigmoid_norm", "label_smoothing": 0.1},
        lambda p: smoothed(BETA * mean_ratio(p), 0.1),
    ),
    "ipo": ("ipo", lambda p: (mean_ratio(p) - 1 / (2 * BETA)) ** 2),
    "ipo of sums": (
        {"name": "ipo", "mean": False},
        lambda p: (ratios(p)[0] - ratios(p)[1] - 1 / (2 * BETA)) ** 2,
    ),
    "hinge": ("hinge", lambda p: np.maximum(0.0, 1.0 - h(p))),
    "robust": (
        {"name": "robust", "label_smoothing": 0.2},
        lambda p: (-0.8 * log_sigmoid(h(p)) + 0.2 * log_sigmoid(-h(p))) / 0.6,
    ),
}


def draw(pairs=40, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {name: -30.0 + 6.0 * rng.normal(size=pairs) for name in LOGPS}
    counts = {f"tokens_{side}": rng.integers(1, 12, pairs) for side in ("chosen", "rejected")}
    return {name: x.astype(np.float32).astype(np.float64) for name, x in {**arrays, **counts}.items()}


def ours(pairs, loss, **options):
    arrays = {name: x.astype(np.float32) for name, x in pairs.items()}
    return dpo_loss(**arrays, beta=BETA, loss_type=loss, **options)


@pytest.mark.parametrize("name", list(FORMULAS))
def test_value_and_gradient_equal_the_formula(name):
    loss, formula = FORMULAS[name]
    pairs = draw()
    assert float(ours(pairs, loss)[0]) == pytest.approx(formula(pairs).mean(), rel=2e-6)
    for side in ("logps_chosen", "logps_rejected"):
        found = jax.grad(lambda x, side=side: ours({**pairs, side: x}, loss)[0])(
            pairs[side].astype(np.float32)
        )
        step = 1e-6
        up, down = (formula({**pairs, side: pairs[side] + s}) for s in (step, -step))
        np.testing.assert_allclose(
            found, (up - down) / (2 * step) / len(pairs[side]), rtol=2e-5, atol=1e-8, err_msg=side
        )


def test_the_metrics_are_those_of_the_implicit_rewards():
    pairs = draw()
    a, b = ratios(pairs)
    metrics = {name: float(x) for name, x in ours(pairs, "ipo")[1].items()}
    assert metrics == pytest.approx(
        {
            "rewards/chosen": (BETA * a).mean(),
            "rewards/rejected": (BETA * b).mean(),
            "rewards/accuracies": (a > b).mean(),
            "rewards/margins": (BETA * (a - b)).mean(),
            "logps/chosen": pairs["logps_chosen"].mean(),
            "logps/rejected": pairs["logps_rejected"].mean(),
        },
        rel=1e-5,
    )
    same = {**pairs, "logps_rejected": pairs["logps_chosen"], "ref_logps_rejected": pairs["ref_logps_chosen"]}
    assert float(ours(same, "sigmoid")[1]["rewards/accuracies"]) == 0  # a tie is not correct


def test_robust_is_unbiased_under_flipped_labels():
    """(1 − ε) loss(pair) + ε loss(the pair with its sides exchanged) is the plain loss."""
    pairs = draw()
    flipped = {
        name: pairs[name.replace("chosen", "x").replace("rejected", "chosen").replace("x", "rejected")]
        for name in pairs
    }
    robust = {"name": "robust", "label_smoothing": 0.3}
    mean = 0.7 * ours(pairs, robust)[0] + 0.3 * ours(flipped, robust)[0]
    assert float(mean) == pytest.approx(float(ours(pairs, "sigmoid")[0]), rel=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust"])
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_finite_far_away(loss, size):
    pairs = draw(4) | {"logps_chosen": np.full(4, size)}
    value, slope = jax.value_and_grad(lambda x: ours({**pairs, "logps_chosen": x}, loss)[0])(
        pairs["logps_chosen"].astype(np.float32)
    )
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


def test_without_smoothing_robust_and_sigmoid_are_the_same_loss_and_one_argument_smooths_both():
    pairs = draw()
    assert float(ours(pairs, "robust")[0]) == pytest.approx(float(ours(pairs, "sigmoid")[0]), rel=1e-6)
    for name, key in (("sigmoid", "cdpo"), ("robust", "robust")):
        found = ours(pairs, name, label_smoothing=0.2)[0]
        assert float(found) == pytest.approx(FORMULAS[key][1](pairs).mean(), rel=2e-6)
