"""Policy losses against float64 NumPy, published numbers, and hand-computed gradients."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_grpo import policy_loss

from rlhf_core import POLICY_LOSS, LossOutput, PolicyInputs, plugins
from rlhf_core.errors import InputError

# Two sequences of three and two tokens.
LOGPS = np.array([[-1.0, -0.5, -2.0], [-0.2, -1.5, 0.0]])
OLD = np.array([[-1.2, -0.5, -1.5], [-0.6, -1.4, 0.0]])
REF = np.array([[-1.1, -0.7, -1.8], [-0.3, -1.2, 0.0]])
MASK = np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
ADVANTAGES = np.array([1.0, -1.0])


def loss(flip=1.0, **options):
    value, metrics = policy_loss(
        *(jnp.asarray(x, jnp.float32) for x in (LOGPS, OLD, flip * ADVANTAGES, MASK)),
        **{"ref_logps": jnp.asarray(REF, jnp.float32), "max_completion_length": 10, **options},
    )
    return float(value), {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "grpo"}, 0.13141042),
        ({"loss_type": "grpo", "beta": 0.04}, 0.13225719),
        ({"loss_type": "dr_grpo"}, -0.02049343),
        ({"loss_type": "dr_grpo", "beta": 0.04}, -0.02029409),
        ({"loss_type": "bnpo"}, -0.08197371),
        ({"loss_type": "dapo"}, -0.08197371),
        ({"loss_type": "bnpo", "beta": 0.04}, -0.08117637),
        ({"loss_type": "bnpo", "epsilon_high": 0.28}, -0.08625426),
        ({"loss_type": "bnpo", "delta": 1.3}, -0.12033865),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, 0.25576860),
        ({"loss_type": "cispo", "epsilon_high": 1.2}, 0.26316104),
        ({"loss_type": "sapo"}, 0.07689927),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, 0.12849841),
        ({"loss_type": "gspo"}, 0.12849841),
        # With the advantages flipped.
        ({"flip": -1.0, "loss_type": "grpo"}, -0.02264223),
        ({"flip": -1.0, "loss_type": "bnpo"}, 0.18331307),
        ({"flip": -1.0, "loss_type": "dr_grpo"}, 0.04582827),
        ({"flip": -1.0, "loss_type": "bnpo", "epsilon_high": 0.28}, 0.16731307),
        ({"flip": -1.0, "loss_type": "gspo"}, -0.12849841),
        ({"flip": -1.0, "loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}, -0.00035),
    ],
)
def test_published_values(options, expected):
    assert loss(**options)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_lies_outside_the_mask_reaches_nothing(bad):
    spoiled = np.where(MASK > 0, LOGPS, bad)

    def ours(x):
        return policy_loss(
            x,
            jnp.asarray(np.where(MASK > 0, OLD, bad), jnp.float32),
            jnp.asarray(ADVANTAGES, jnp.float32),
            jnp.asarray(MASK, jnp.float32),
            ref_logps=jnp.asarray(np.where(MASK > 0, REF, -bad), jnp.float32),
            beta=0.04,
            importance_sampling_level="sequence",
        )[0]

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(spoiled, jnp.float32))
    clean = jax.value_and_grad(ours)(jnp.asarray(LOGPS, jnp.float32))
    assert float(value) == float(clean[0])
    np.testing.assert_array_equal(gradient, clean[1])


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.2, [0.9, 1.0]),
        (0.5, [0.6, 0.7, 0.8, 0.9, 1.0]),
        (1.0, [0.1 * i for i in range(1, 11)]),
        (0.0, [1.0]),
    ],
)
def test_entropy_quantile(share, kept):
    """What is left out of the loss has no gradient."""
    entropies = np.arange(1, 13).reshape(2, 6) / 10
    mask = np.ones((2, 6))
    mask[1, 4:] = 0
    np.testing.assert_allclose(entropies[trained(entropies, mask, share)], kept)


def test_no_entropy_is_kept_where_all_is_masked():
    assert not trained(np.arange(1, 13).reshape(2, 6) / 10, np.zeros((2, 6)), 0.2).any()


def trained(entropies, mask, share):
    def loss(logps):
        options = {"entropies": jnp.asarray(entropies, jnp.float32), "top_entropy_quantile": share}
        return policy_loss(logps, None, jnp.ones(2), mask, **options)[0]

    return np.asarray(jax.grad(loss)(jnp.zeros((2, 6)))) != 0


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_where_the_policy_is_the_reference_only_k1_has_a_gradient(kl, bias_correction):
    """With the policy's own numbers as the reference's, k2 and k3 have no gradient; k1's is the score everywhere."""
    own = jnp.full((2, 3), -1.0)
    options = {
        "ref_logps": own.at[1].add(1e-6),
        "beta": 0.1,
        "kl": kl,
        "use_bias_correction_kl": bias_correction,
    }

    def total(logps):
        return 6 * policy_loss(logps, None, jnp.zeros(2), jnp.ones((2, 3)), **options)[0]

    gradient = jax.grad(total)(own)
    np.testing.assert_allclose(gradient[0], np.float32(0.1) if kl == "k1" else 0, rtol=1e-6)
    assert gradient[1].all()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("epsilon", [0.2, 0.05])
def test_names_for_losses_with_another_default(per_token, epsilon):
    """`bnpo` is `dapo`; `gspo_token` is `gspo` with a gradient per token (Zheng et al. 2025, eqs. 13 and 14), and not
    `gspo` where advantages differ within a sequence. In float64."""
    advantages = np.array([[1.0, -0.5, 2.0], [-1.0, 0.25, 0.0]]) if per_token else ADVANTAGES

    def ours(loss_type, level="token"):
        options = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon": epsilon}
        return jax.value_and_grad(lambda x: policy_loss(x, OLD, advantages, MASK, **options)[0])(
            jnp.asarray(LOGPS)
        )

    with jax.enable_x64(True):
        bnpo, dapo, token, sequence = map(ours, ("bnpo", "dapo", "gspo_token", "gspo"))
        chosen = ours("gspo", "sequence_token")
    a = advantages if per_token else advantages[:, None]
    s = np.exp(((LOGPS - OLD) * MASK).sum(1) / MASK.sum(1))[:, None]
    clipped = np.clip(s, 1 - epsilon, 1 + epsilon)
    weight = MASK / MASK.sum(1, keepdims=True) / 2
    value = (-np.minimum(s * a, clipped * a) * weight).sum()
    gradient = np.where(s * a <= clipped * a, -s * a, 0.0) * weight
    for found, expected in zip(token, (value, gradient), strict=True):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    for one, other in ((bnpo, dapo), (token, chosen)):
        for found, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(sequence[0], value, rtol=1e-12)
    assert np.allclose(sequence[1], gradient, rtol=1e-12, atol=1e-15) == (not per_token)


@pytest.mark.parametrize(("kl", "expected"), [("k1", 100.0), ("k2", 5000.0), ("k3", 99.0)])
def test_the_kl_is_not_cut_off_at_a_log_ratio_of_one_hundred(kl, expected):
    one = jnp.ones((1, 1))
    _, metrics = policy_loss(100 * one, None, one[0], one, ref_logps=0 * one, kl=kl)
    assert float(metrics["kl"]) == pytest.approx(expected)


@dataclass(frozen=True)
class Strict:
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        if self.epsilon > 1:
            raise ValueError("epsilon must be at most 1")

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(-self.epsilon * inputs.logps)


@pytest.fixture
def registry(monkeypatch):
    """The registry that `policy_loss` asks for losses."""
    host = plugins.load()
    monkeypatch.setattr("rlhf_core.training.padded.installed_registry", lambda: host.registry)
    return host.registry


def test_policy_loss_does_not_drop_what_a_loss_of_a_plugin_objects_to(registry):
    registry.add(POLICY_LOSS, "strict", Strict)
    assert loss(loss_type="strict", epsilon=0.4)[0] == pytest.approx(
        2 * loss(loss_type="strict", epsilon=0.2)[0]
    )
    with pytest.raises(InputError, match="epsilon must be at most 1"):
        loss(loss_type="strict", epsilon=2.0)
    with pytest.raises(InputError, match="policy loss 'strict' has level 'token'"):
        loss(loss_type="strict", importance_sampling_level="sequence")
