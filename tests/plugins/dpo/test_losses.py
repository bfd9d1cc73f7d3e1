"""The losses in float64 NumPy from the papers' formulas: value and gradient, options, extremes; TRL's numbers."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
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


def means(p):
    return p["logps_chosen"] / p["tokens_chosen"], p["logps_rejected"] / p["tokens_rejected"]


def odds(mean):
    return np.exp(mean) / -np.expm1(mean)


def simpo(p, gamma=1.0):
    chosen, rejected = means(p)
    return -log_sigmoid(BETA * (chosen - rejected) - gamma)


def orpo(p, weight=0.1):
    chosen, rejected = means(p)
    return -chosen - weight * log_sigmoid(np.log(odds(chosen) / odds(rejected)))


def cpo(p, alpha=1.0):
    return -log_sigmoid(BETA * (p["logps_chosen"] - p["logps_rejected"])) - alpha * means(p)[0]


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
    "simpo": ("simpo", simpo),
    "simpo closer": ({"name": "simpo", "gamma": 0.25}, lambda p: simpo(p, 0.25)),
    "orpo": ("orpo", orpo),
    "orpo heavier": ({"name": "orpo", "weight": 2.0}, lambda p: orpo(p, 2.0)),
    "cpo": ("cpo", cpo),
    "cpo lighter": ({"name": "cpo", "alpha": 0.25}, lambda p: cpo(p, 0.25)),
}
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo")
TRL = json.loads(Path(__file__).with_name("trl.json").read_text())
"""Written by benchmarks/interop/trl_losses.py."""


def draw(pairs=40, seed=0):
    rng = np.random.default_rng(seed)
    likely = np.where(np.arange(pairs) % 2, 1.0, 0.02)  # of half of the pairs, a few tokens of p ≈ ½
    arrays = {name: likely * (-30.0 + 6.0 * rng.normal(size=pairs)) for name in LOGPS}
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


@pytest.mark.parametrize("loss", WITHOUT_REFERENCE)
def test_without_a_reference_implicit_rewards_are_log_probabilities(loss):
    pairs = draw()
    alone = {name: x for name, x in pairs.items() if not name.startswith("ref")}
    value, metrics = ours(alone, loss)
    assert ours(pairs, loss)[0] == value  # one that is given is not read
    assert float(metrics["rewards/chosen"]) == pytest.approx((BETA * pairs["logps_chosen"]).mean(), rel=1e-5)
    chosen, rejected = means(pairs)
    own = {
        "simpo": {
            "simpo/margins": (BETA * (chosen - rejected)).mean(),
            "simpo/accuracies": (chosen > rejected).mean(),
        },
        "orpo": {"orpo/nll": -chosen.mean(), "orpo/accuracies": (chosen > rejected).mean()},
        "cpo": {"cpo/nll": -chosen.mean()},
    }[loss]
    assert {name: float(x) for name, x in metrics.items() if "/" in name and name.startswith(loss)} == (
        pytest.approx(own, rel=1e-5)
    )


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: f"{case['trainer']} {case['options']}")
def test_value_and_gradient_equal_those_of_trl(case):
    """Recorded of TRL's trainers on padded rows, of a model whose logits are a table by the token before."""

    def loss(table):
        logps, given = jax.nn.log_softmax(table), {}
        for side, rows in TRL["rows"].items():
            own = [
                [(a, b) for a, b in zip(row["input_ids"], row["labels"][1:], strict=False) if b >= 0]
                for row in rows
            ]
            given[f"logps_{side}"] = jnp.stack([sum(logps[a, b] for a, b in row) for row in own])
            given[f"tokens_{side}"] = np.array([len(row) for row in own])
        return dpo_loss(**given, beta=case["options"]["beta"], loss_type=case["ours"])[0]

    value, gradient = jax.value_and_grad(loss)(jnp.array(TRL["logits"]))
    assert float(value) == pytest.approx(case["loss"], rel=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-5, atol=1e-6)


def test_odds_are_finite_where_a_completion_is_certain():
    near = np.array([0.0, -1e-12, -1e-8, -1e-7, -1e-6, -1e-3], np.float32)
    chosen, rejected = (x.reshape(-1) for x in np.meshgrid(near, near))
    value, slopes = jax.value_and_grad(lambda *logps: dpo_loss(*logps, loss_type="orpo")[0], (0, 1))(
        chosen, rejected
    )
    assert np.isfinite(value)
    assert np.isfinite(slopes).all()


def test_beta_that_is_not_given_is_the_losss_own():
    pairs = {name: x.astype(np.float32) for name, x in draw().items()}
    for loss, beta in (("simpo", 2.0), ("cpo", 0.1), ("sigmoid", 0.1)):
        assert dpo_loss(**pairs, loss_type=loss)[0] == dpo_loss(**pairs, beta=beta, loss_type=loss)[0]


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", *WITHOUT_REFERENCE])
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
