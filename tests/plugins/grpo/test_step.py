"""grpo_step and the log-probability functions over padded arrays, against logits in float64 and policy_loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rlhf_grpo import (
    get_per_token_logps,
    get_per_token_logps_and_entropies,
    grpo_step,
    policy_loss,
)

from rlhf_core import create_state

N, G, P, C = 8, 4, 6, 7
SGD = optax.sgd(1.0)
"""One object for all tests, as it is a part of what a compiled step is found by."""


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("lm", scale=8.0, num_hidden_layers=1)


@pytest.fixture(scope="module")
def batch(model):
    """Two groups of four; prompts padded on the left, completions on the right, all lengths different."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(3, 48, (N // G, P))
    prompt_mask = np.arange(P) >= np.array([[2], [0]])
    completions = draw.integers(3, 48, (N, C))
    mask = np.arange(C) < np.array([1, 7, 3, 5, 2, 4, 7, 6])[:, None]
    out = {
        "prompt_ids": np.repeat(prompts * prompt_mask, G, 0),
        "prompt_mask": np.repeat(prompt_mask, G, 0).astype(np.int32),
        "completion_ids": completions * mask,
        "completion_mask": mask.astype(np.int32),
        "advantages": draw.normal(size=N).astype(np.float32),
    }
    own = reference(model, out)[0]
    out["old_per_token_logps"] = (own + 0.3 * draw.normal(size=(N, C))).astype(np.float32)
    out["ref_per_token_logps"] = (own + 0.3 * draw.normal(size=(N, C))).astype(np.float32)
    return out


def joined(batch):
    ids = np.concatenate([batch["prompt_ids"], batch["completion_ids"]], 1)
    return ids, np.concatenate([batch["prompt_mask"], batch["completion_mask"]], 1)


def reference(model, batch, temperature=1.0):
    """(log-probabilities, entropies) of the completions in float64, from the model's logits."""
    ids, mask = joined(batch)
    logits = np.asarray(model.logits(ids, mask), np.float64)[:, P - 1 : -1] / temperature
    logits -= logits.max(-1, keepdims=True)
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = np.take_along_axis(every, ids[:, P:, None], -1)[..., 0]
    return own, -(np.exp(every) * every).sum(-1)


def state_of(model):
    return create_state(model, SGD)


def numbers(metrics):
    return {name: float(x) for name, x in metrics.items()}


def without(batch, *names):
    return {k: v for k, v in batch.items() if k not in names}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies_equal_those_of_the_logits(model, batch, temperature):
    ids, mask = joined(batch)
    logps, entropies = get_per_token_logps_and_entropies(model, ids, mask, P, temperature)
    alone = get_per_token_logps(model, ids, mask, P, temperature)
    expected, spread = reference(model, batch, temperature)
    there = batch["completion_mask"] > 0
    assert logps.shape == (N, C)
    assert logps.dtype == jnp.float32
    assert spread[there].std() > 0.01
    np.testing.assert_allclose(np.asarray(logps)[there], expected[there], atol=2e-5)
    np.testing.assert_allclose(np.asarray(entropies)[there], spread[there], atol=2e-5)
    np.testing.assert_array_equal(alone, logps)


def expected_loss(model, batch, *, temperature=1.0, **options):
    own, entropies = (jnp.asarray(x, jnp.float32) for x in reference(model, batch, temperature))
    loss, metrics = policy_loss(
        own,
        batch.get("old_per_token_logps"),
        batch["advantages"],
        batch["completion_mask"],
        ref_logps=batch.get("ref_per_token_logps"),
        entropies=entropies,
        num_items=batch.get("num_items_in_batch"),
        **options,
    )
    return {**numbers(metrics), "loss": float(loss)}


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo", "temperature": 0.7, "delta": 1.1, "beta": 0.0},
        {"loss_type": "dr_grpo", "max_completion_length": 20},
        pytest.param({"top_entropy_quantile": 0.4, "loss_type": "grpo"}, marks=pytest.mark.long),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "use_bias_correction_kl": True},
        {"loss_type": "gspo", "use_bias_correction_kl": True},
        {"loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": None},
    ],
    ids=str,
)
def test_the_loss_is_policy_loss_of_the_log_probabilities(model, batch, options):
    """`cispo` and `sapo` through a model are in tests/invariants/test_grpo.py."""
    options = {"beta": 0.2, "epsilon": 0.2, "epsilon_high": 0.2, **options}
    same, metrics = grpo_step(state_of(model), batch, is_training=False, **options)
    assert int(same.step) == 0
    jax.tree.map(np.testing.assert_array_equal, same.params, model.params)
    expected = expected_loss(model, batch, **options)
    assert abs(expected["loss"]) > 1e-3
    assert numbers(metrics) == pytest.approx(expected, rel=2e-4, abs=2e-6)


def assert_close(tiny, params, others, tolerance=1e-5):
    ours, theirs = tiny.leaves(params), tiny.leaves(others)
    for name, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[name], atol=tolerance, err_msg=name)


def test_easydel_s_arguments_are_taken_in_their_order(model, batch):
    state = state_of(model)
    _, ours = grpo_step(state, batch, is_training=False)
    with pytest.warns(
        UserWarning, match="^partition_spec: has no effect here: a batch is split as its arrays"
    ):
        _, theirs = grpo_step(state, batch, 4, 0.04, None, None, "dp", 1, False)
    assert numbers(theirs) == numbers(ours)
    assert float(theirs.loss) == float(theirs["loss"])


def test_num_items_is_the_divisor_whatever_the_splits(model, batch):
    tokens = int(batch["completion_mask"].sum())
    state = state_of(model)
    plain = grpo_step(state, batch)[1]
    for splits, is_training in ((1, True), (4, True), (2, False)):
        options = {"gradient_accumulation_steps": splits, "is_training": is_training}
        same = grpo_step(state, {**batch, "num_items_in_batch": tokens}, **options)[1]
        half = grpo_step(state, {**batch, "num_items_in_batch": jnp.int32(2 * tokens)}, **options)[1]
        assert float(same["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-5)
        assert float(half["loss"]) == pytest.approx(float(plain["loss"]) / 2, rel=1e-5)
        if is_training:
            assert float(half["grad_norm"]) == pytest.approx(float(plain["grad_norm"]) / 2, rel=1e-4)


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped(model, batch):
    ids, mask = joined(batch)
    own = np.asarray(get_per_token_logps(model, ids, mask, P))  # as in the batch, for the same program
    on_policy = {**without(batch, "old_per_token_logps"), "ref_per_token_logps": own}
    state = state_of(model)
    for given in (on_policy, {**on_policy, "old_per_token_logps": own}):
        metrics = numbers(grpo_step(state, given)[1])
        a = batch["advantages"][:, None] * batch["completion_mask"]
        assert metrics["loss"] == pytest.approx(-a.sum() / batch["completion_mask"].sum(), rel=1e-5)
        assert {k: v for k, v in metrics.items() if k.startswith("clip_ratio/")} == {
            f"clip_ratio/{side}_mean": 0.0 for side in ("low", "high", "region")
        }
        assert metrics["kl"] == pytest.approx(0, abs=1e-9)
        assert metrics["grad_norm"] > 1e-3


def test_nothing_to_train_on_is_a_loss_of_0(model, batch):
    nothing = {**batch, "completion_mask": np.zeros_like(batch["completion_mask"])}
    for is_training in (True, False):
        _, metrics = grpo_step(state_of(model), nothing, is_training=is_training)
        assert float(metrics["loss"]) == 0
        assert ("grad_norm" in metrics) == is_training


def test_padding_reaches_nothing(tiny, model, batch):
    """Wider on both sides, other tokens in the padding, infinities in the arrays there."""
    there = batch["completion_mask"] > 0
    wide = {
        "prompt_ids": np.pad(
            np.where(batch["prompt_mask"] > 0, batch["prompt_ids"], 9), ((0, 0), (3, 0)), constant_values=5
        ),
        "prompt_mask": np.pad(batch["prompt_mask"], ((0, 0), (3, 0))),
        "completion_ids": np.pad(np.where(there, batch["completion_ids"], 8), ((0, 0), (0, 2))),
        "completion_mask": np.pad(batch["completion_mask"], ((0, 0), (0, 2))),
        "advantages": batch["advantages"],
    }
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        wide[name] = np.pad(np.where(there, batch[name], -np.inf), ((0, 0), (0, 2)), constant_values=np.nan)
    one, metrics = grpo_step(state_of(model), batch)
    other, others = grpo_step(state_of(model), wide)
    assert numbers(others) == pytest.approx(numbers(metrics), rel=1e-5, abs=1e-6)
    assert_close(tiny, one.params, other.params)
