"""Importance sampling between sampler and trainer, against float64 NumPy. Packed: tests/invariants/test_grpo.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_grpo import GRPOConfig
from rlhf_grpo.objective import Terms, combine, importance, mismatch

from rlhf_core import POLICY_LOSS, PolicyInputs, installed_registry
from rlhf_core.metrics import results

N, T = 5, 7
CASES = [
    {"level": level, "mode": mode, "max": 1.02 if level == "geometric" else 1.4, "min": 0.7}
    for level in ("token", "sequence", "geometric")
    for mode in ("truncate", "mask")
]


@pytest.fixture(scope="module")
def arrays():
    draw = np.random.default_rng(7)
    lengths = np.array([7, 3, 1, 0, 5])
    mask = (np.arange(T) < lengths[:, None]).astype(np.float32)
    mask[0, 2] = 0  # a hole
    old = -draw.random((N, T))
    sampling = old + draw.normal(0, 0.5, (N, T))
    sampling[mask == 0] = -50.0  # what lies outside must not matter
    return {
        "logps": old + draw.normal(0, 0.2, (N, T)),
        "old": old,
        "sampling": sampling,
        "advantages": np.broadcast_to(draw.normal(size=(N, 1)), (N, T)),
        "mask": mask,
        "ref": old + draw.normal(0, 0.1, (N, T)),
    }


def correction(**options):
    return GRPOConfig(sampler_correction=options).sampler_correction


def expected_ratio(a, level, mode, low, high):
    difference = np.where(a["mask"] > 0, a["old"] - a["sampling"], 0.0)
    if level == "sequence":
        difference = np.broadcast_to(difference.sum(1, keepdims=True), (N, T))
    if level == "geometric":
        count = np.maximum(a["mask"].sum(1, keepdims=True), 1)
        difference = np.broadcast_to(difference.sum(1, keepdims=True) / count, (N, T))
    ratio = np.exp(difference)
    if mode == "truncate":
        return np.clip(ratio, low, high)
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def inputs_of(a, logps):
    each = {name: jnp.asarray(a[name], jnp.float32) for name in a}
    return PolicyInputs(logps, each["old"], each["advantages"], each["mask"], ref_logps=each["ref"])


@pytest.mark.parametrize("options", CASES, ids=str)
def test_correction_multiplies_the_policy_loss_and_not_the_kl_term(arrays, options):
    a, beta = arrays, 0.3
    weight = expected_ratio(a, options["level"], options["mode"], options["min"], options["max"])
    there = a["mask"] > 0
    free = expected_ratio(a, options["level"], "truncate", 0.0, np.inf)
    assert (weight != free)[there].any()  # the bounds act
    assert (weight == free)[there].any()

    dapo = installed_registry().get(POLICY_LOSS, "dapo")

    def loss(logps):
        inputs = inputs_of(a, logps)
        ratio = importance(inputs, jnp.asarray(a["sampling"], jnp.float32), correction(**options))
        value, _ = combine(dapo, inputs, Terms("dapo", beta=beta), sequences=N, importance=ratio)
        return value.total / value.count

    def reference(logps):
        r = np.exp(logps - a["old"])
        surrogate = -np.minimum(r * a["advantages"], np.clip(r, 0.8, 1.2) * a["advantages"])
        d = a["ref"] - logps
        return ((surrogate * weight + beta * (np.exp(d) - d - 1)) * a["mask"]).sum() / a["mask"].sum()

    got, gradient = jax.value_and_grad(loss)(jnp.asarray(a["logps"], jnp.float32))
    assert float(got) == pytest.approx(reference(a["logps"]), rel=1e-5)
    for at in [(0, 0), (0, 6), (1, 2), (2, 0), (4, 4)]:
        step = np.zeros((N, T))
        step[at] = 1e-6
        slope = (reference(a["logps"] + step) - reference(a["logps"] - step)) / 2e-6
        assert float(gradient[at]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_metrics(arrays):
    a = arrays
    inputs, sampling = inputs_of(a, jnp.zeros((N, T))), jnp.asarray(a["sampling"], jnp.float32)
    ratio = importance(inputs, sampling, correction(level="token", mode="truncate", max=1.2))
    found = {name: float(x) for name, x in results(mismatch(inputs, sampling, ratio)).items()}
    there = a["mask"] > 0
    difference = np.abs(a["old"] - a["sampling"])[there]
    expected = expected_ratio(a, "token", "truncate", 0.0, 1.2)[there]
    assert found == {
        "sampling/logp_difference_max": pytest.approx(difference.max(), rel=1e-5),
        "sampling/logp_difference_mean": pytest.approx(difference.mean(), rel=1e-5),
        "sampling/importance_ratio_mean": pytest.approx(expected.mean(), rel=1e-5),
        "sampling/importance_ratio_min": pytest.approx(expected.min(), rel=1e-5),
        "sampling/importance_ratio_max": pytest.approx(1.2, rel=1e-5),
    }
