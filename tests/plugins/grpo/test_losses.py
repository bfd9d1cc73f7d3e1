"""Policy losses against float64 NumPy, published numbers, and hand-computed gradients."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_grpo import policy_loss
from rlhf_grpo.objective import Terms, combine

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


def test_clip_and_kl_metrics():
    metrics = loss(loss_type="dapo", beta=0.04)[1]
    assert metrics["clip_ratio/low_mean"] == 0
    assert metrics["clip_ratio/high_mean"] == pytest.approx(0.2)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(0.2)
    assert metrics["kl"] == pytest.approx(0.01993343, abs=1e-6)
    flipped = loss(flip=-1.0, loss_type="dapo")[1]
    assert flipped["clip_ratio/low_mean"] == pytest.approx(0.2)
    assert flipped["clip_ratio/high_mean"] == pytest.approx(0.2)


RATIOS = [0.5, 1.0, 1.25, 2.0, 10.0]
PPO = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}


@pytest.mark.parametrize(
    ("options", "advantage", "values", "slopes"),
    [
        (PPO, 1.0, [-0.5, -1, -1.25, -1.28, -1.28], [-0.5, -1, -1.25, 0, 0]),
        (PPO, -1.0, [0.8, 1, 1.25, 2, 10], [0, 1, 1.25, 2, 10]),
        ({**PPO, "delta": 4.0}, -1.0, [0.8, 1, 1.25, 2, 4], [0, 1, 1.25, 2, 0]),
        ({**PPO, "dual_clip": 3.0}, -1.0, [0.8, 1, 1.25, 2, 3], [0, 1, 1.25, 2, 0]),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, 1.0, None, [-0.5, -1, -1.25, -2, -5]),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, -1.0, None, [0.5, 1, 1.25, 2, 5]),
    ],
)
def test_value_and_slope_against_the_ratio(options, advantage, values, slopes):
    def one(logp, old):
        ones = jnp.ones((1, 1))
        return policy_loss(logp[None, None], old[None, None], advantage * ones[0], ones, **options)[0]

    old = jnp.float32(-1.0)
    for i, r in enumerate(RATIOS):
        value, slope = jax.value_and_grad(one)(old + jnp.log(jnp.float32(r)), old)
        assert float(slope) == pytest.approx(slopes[i], abs=1e-5)
        if values is not None:
            assert float(value) == pytest.approx(values[i], abs=1e-5)


@pytest.mark.parametrize("kind", ["gspo", "gspo_token"])
def test_the_gradient_of_a_sequence_s_ratio(kind):
    """Per token it is −A s / |y|, with s its sequence's ratio; one advantage per sequence makes both losses agree."""

    def of_sequences(logps):
        arrays = (jnp.asarray(x, jnp.float32) for x in (OLD, ADVANTAGES, MASK))
        return policy_loss(logps, *arrays, loss_type=kind, epsilon=0.5)[0]

    ratio = np.exp(((LOGPS - OLD) * MASK).sum(-1) / MASK.sum(-1))
    expected = -(ADVANTAGES * ratio / MASK.sum(-1))[:, None] * MASK / len(LOGPS)
    gradient = jax.grad(of_sequences)(jnp.asarray(LOGPS, jnp.float32))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("kl", "at", "value", "slope"),
    [
        ("k1", -1.0, -1.0, 1.0),
        ("k1", 0.5, 0.5, 1.0),
        ("k1", 2.0, 2.0, 1.0),
        ("k2", -1.0, 0.5, -1.0),
        ("k2", 0.5, 0.125, 0.5),
        ("k2", 2.0, 2.0, 2.0),
        ("k3", -1.0, 0.7183, -1.7183),
        ("k3", 0.5, 0.1065, 0.3935),
        ("k3", 2.0, 1.1353, 0.8647),
    ],
)
def test_kl_estimators(kl, at, value, slope):
    def only_kl(d):
        one = jnp.ones((1, 1))
        return policy_loss(d * one, None, 0 * one[0], one, ref_logps=0 * one, beta=1.0, kl=kl)[0]

    got = jax.value_and_grad(only_kl)(jnp.float32(at))
    assert np.asarray(got) == pytest.approx([value, slope], abs=1e-4)


def numpy_loss(logps, old, advantages, mask, *, kind, level, beta, ref, num_items, coef, entropies):
    """The definitions, in float64."""
    d = logps - old
    if level == "sequence":
        d = np.broadcast_to(
            (d * mask).sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1), d.shape
        )
    r, a = np.exp(d), advantages[:, None]
    if kind == "cispo":
        value = -np.minimum(r, 0.3) * a * logps
    elif kind == "sapo":
        t = np.where(a > 0, 1.0, 1.05)
        value = -4 / (1 + np.exp(-t * (r - 1))) / t * a
    else:
        value = -np.minimum(r * a, np.clip(r, 0.8, 1.3) * a)
    k = np.exp(ref - logps) - (ref - logps) - 1
    value = value + beta * k
    if kind in ("grpo", "sapo"):
        out = ((value * mask).sum(1) / np.maximum(mask.sum(1), 1)).mean()
    elif kind == "dr_grpo":
        out = (value * mask).sum() / (len(mask) * 20)
    else:
        out = (value * mask).sum() / (mask.sum() if num_items is None else num_items)
    return out - coef * (entropies * mask).sum() / mask.sum()


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_against_numpy_with_holes_and_empty_rows(kind, level):
    rng = np.random.default_rng(3)
    logps, old, ref = (-rng.exponential(1.0, (5, 7)) for _ in range(3))
    mask = (rng.random((5, 7)) < 0.6).astype(float)
    mask[2] = 0
    advantages, entropies = rng.normal(size=5), rng.random((5, 7))
    num_items = 31.0 if kind == "dapo" else None
    options = {"kind": kind, "level": level, "beta": 0.1, "ref": ref, "num_items": num_items, "coef": 0.05}
    expected = numpy_loss(logps, old, advantages, mask, entropies=entropies, **options)

    def ours(x):
        return policy_loss(
            x,
            jnp.asarray(old, jnp.float32),
            jnp.asarray(advantages, jnp.float32),
            jnp.asarray(mask, jnp.float32),
            ref_logps=jnp.asarray(ref, jnp.float32),
            loss_type=kind,
            beta=0.1,
            epsilon_high=0.3,
            importance_sampling_level=level,
            num_items=num_items,
            max_completion_length=20,
            entropies=jnp.asarray(entropies, jnp.float32),
            entropy_coef=0.05,
        )[0]

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(logps, jnp.float32))
    assert float(value) == pytest.approx(expected, rel=1e-5)
    if kind != "cispo":  # its weight has no gradient, so differences of the value say nothing about it
        for i, t in [(0, 0), (1, 3), (4, 6), (2, 2)]:
            moved = logps.copy()
            moved[i, t] += 1e-6
            up = numpy_loss(moved, old, advantages, mask, entropies=entropies, **options)
            assert float(gradient[i, t]) == pytest.approx((up - expected) / 1e-6, abs=2e-5)
    assert np.all(np.asarray(gradient)[mask == 0] == 0)


def test_without_old_logps_the_ratio_is_one_and_the_gradient_is_not_zero():
    mask = jnp.asarray(MASK, jnp.float32)

    def ours(x):
        return policy_loss(x, None, jnp.asarray(ADVANTAGES, jnp.float32), mask)

    (value, metrics), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(LOGPS, jnp.float32))
    assert float(value) == pytest.approx(-(3 - 2) / 5)
    assert float(metrics["clip_ratio/region_mean"]) == 0
    np.testing.assert_allclose(gradient, -ADVANTAGES[:, None] * MASK / 5, rtol=1e-6)


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


def test_an_empty_mask_is_a_loss_of_zero_with_zero_gradient():
    zero = jnp.zeros((2, 3))

    def ours(x):
        return policy_loss(x, None, jnp.ones(2), zero)[0]

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(LOGPS, jnp.float32))
    assert float(value) == 0
    assert not np.asarray(gradient).any()


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


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)], ids=str)
def test_a_loss_that_is_not_a_number_a_token_is_named(shape):
    """A mean would be broadcast in silence, and averaged once more."""
    values = jnp.ones((2, 3), jnp.float32)
    inputs = PolicyInputs(values, values, values, values)
    with pytest.raises(InputError, match=r"policy loss 'mine' returned an array of shape .*\[2, 3\]"):
        combine(lambda _: LossOutput(jnp.ones(shape)), inputs, Terms("mine"), sequences=2)


class Plain:
    """A policy loss whose values are the log-probabilities themselves, so that only the averaging is left."""

    def __init__(self, aggregation):
        self.aggregation = aggregation

    def __call__(self, inputs):
        return LossOutput(inputs.logps)


def average(values, lengths, aggregation, sequences=None, num_items=None):
    """Sum and count of these values, the first `lengths` of each row."""
    values = jnp.asarray(values, jnp.float32)
    mask = (np.arange(values.shape[1]) < np.array(lengths)[:, None]).astype(np.float32)
    inputs = PolicyInputs(values, jnp.zeros_like(values), jnp.ones_like(values), jnp.asarray(mask))
    rows = len(lengths) if sequences is None else sequences
    return combine(Plain(aggregation), inputs, Terms("plain"), sequences=rows, num_items=num_items)[0]


@pytest.mark.parametrize(
    ("aggregation", "values", "lengths", "expected"),
    [
        ("token_mean", [[1, 2, 0], [3, 4, 5], [7, 0, 0]], [2, 3, 1], 22 / 6),
        ("sequence_mean", [[1, 3, 9], [2, 4, 0], [8, 0, 0]], [2, 2, 1], 13 / 3),
        ("fixed_length", [[1, 2, 0], [3, 4, 5], [7, 0, 0]], [2, 3, 1], 22 / 3),
    ],
)
def test_averages_are_the_same_when_two_ranks_share_the_rows(aggregation, values, lengths, expected):
    assert float(average(values, lengths, aggregation).result()) == pytest.approx(expected)
    parts = [average(values[rows], lengths[rows], aggregation) for rows in (slice(0, 2), slice(2, 3))]
    assert float(parts[0].merge(parts[1]).result()) == pytest.approx(expected)


def test_a_wholly_masked_row_counts_as_zero_in_the_mean_over_sequences():
    assert float(average([[1, 3], [5, 7]], [2, 0], "sequence_mean").result()) == 1.0


def test_micro_batches_of_two_and_five_tokens():
    """Their sum is 28: a mean of the two means would be 3.25."""
    small, large = (
        average([[1, 2, 0]], [2], "token_mean"),
        average([[3, 4, 5], [6, 7, 0]], [3, 2], "token_mean"),
    )
    assert float(small.merge(large).result()) == 4.0
    assert float(small.result() + large.result()) / 2 == 3.25


def test_the_policy_loss_of_two_ranks():
    """Advantages a token, zeros among them, and a hole."""
    logps = np.array([[-0.2, -0.4, -0.1], [-0.7, -0.3, -0.2], [-0.6, -0.1, -0.5]])
    moved = np.array([[0.03, -0.04, 0.01], [0.02, 0.05, -0.03], [0.04, 0.0, -0.02]])
    advantages = np.array([[1.0, -0.5, 0.0], [0.3, -1.2, 0.5], [1.5, 0.0, -0.7]])
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 1]])
    for shift in (0.0, 0.3):  # without it nothing is clipped
        r = np.exp(moved + shift)
        value = -np.minimum(r * advantages, np.clip(r, 0.8, 1.2) * advantages)
        expected = (value * mask).sum() / 7

        def ours(rows, logps=logps, old=logps - moved - shift):
            arrays = (x[rows].astype(np.float32) for x in (logps, old, advantages, mask))
            return float(policy_loss(*arrays, loss_type="bnpo", num_items=7.0)[0])

        assert ours(slice(0, 3)) == pytest.approx(expected, rel=1e-5)
        assert ours(slice(0, 2)) + ours(slice(2, 3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kl", "expected"), [("k1", 100.0), ("k2", 5000.0), ("k3", 99.0)])
def test_the_kl_is_not_cut_off_at_a_log_ratio_of_one_hundred(kl, expected):
    one = jnp.ones((1, 1))
    _, metrics = policy_loss(100 * one, None, one[0], one, ref_logps=0 * one, kl=kl)
    assert float(metrics["kl"]) == pytest.approx(expected)


def three() -> PolicyInputs:
    draw = np.random.default_rng(0)
    logps = jnp.asarray(-draw.exponential(1.0, (3, 4)), jnp.float32)
    mask = jnp.asarray([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], jnp.float32)
    return PolicyInputs(logps, logps, jnp.ones((3, 4)), mask, ref_logps=logps)


@dataclass(frozen=True)
class Wrong:
    aggregation: ClassVar[str] = "sequence"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(inputs.logps)


@dataclass(frozen=True)
class WrongLevel:
    importance_sampling_level: str = "sentence"

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(inputs.logps)


@pytest.mark.parametrize(
    ("loss", "terms"), [(Wrong(), Terms("x")), (WrongLevel(), Terms("x", 0.1, bias_correction=True))]
)
def test_a_loss_that_was_never_registered_is_refused_where_it_is_used(loss: Any, terms: Terms) -> None:
    with pytest.raises(InputError, match="it is one of"):
        combine(loss, three(), terms, sequences=3)


@dataclass(frozen=True)
class Strict:
    epsilon: float = 0.2

    def __post_init__(self) -> None:
        if self.epsilon > 1:
            raise ValueError("epsilon must be at most 1")

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        return LossOutput(-self.epsilon * inputs.logps)


def test_policy_loss_does_not_drop_what_a_loss_of_a_plugin_objects_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = plugins.load()
    host.registry.add(POLICY_LOSS, "strict", Strict)
    monkeypatch.setattr("rlhf_grpo.functional.installed_registry", lambda: host.registry)
    given = three()

    def loss(**options: Any) -> float:
        return float(
            policy_loss(given.logps, None, given.advantages, given.mask, loss_type="strict", **options)[0]
        )

    assert loss(epsilon=0.4) == pytest.approx(2 * loss(epsilon=0.2))
    with pytest.raises(InputError, match="epsilon must be at most 1"):
        loss(epsilon=2.0)
    with pytest.raises(InputError, match="policy loss 'strict' has level 'token'"):
        loss(importance_sampling_level="sequence")
