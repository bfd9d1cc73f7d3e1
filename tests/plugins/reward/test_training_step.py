"""training_step and evaluation_step of a whole model; test_reference_values.py has their numbers."""

from functools import partial

import jax
import numpy as np
import optax
import pytest
from rlhf_reward import evaluation_step, pairwise_loss, training_step

from rlhf_core import create_state

SGD = optax.sgd(1.0)
"""One object for all tests, as it is a part of what a compiled step is found by; so are the sizes of the batches."""
METRICS = {"accuracy", "ties", "margin", "mean_reward", "min_reward", "max_reward", "loss"}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model("score", scale=4.0, num_hidden_layers=1)


@pytest.fixture(scope="module")
def sequences():
    draw = np.random.default_rng(3)
    return {
        side: [draw.integers(3, 48, n) for n in draw.integers(2, longest, 8)]
        for side, longest in (("chosen", 9), ("rejected", 14))
    }


def padded(sequences, *, side, extra=0):
    width = max(map(len, sequences)) + extra
    ids, mask = np.full((len(sequences), width), 7, np.int32), np.zeros((len(sequences), width), np.int32)
    for i, tokens in enumerate(sequences):
        at = slice(len(tokens)) if side == "right" else slice(width - len(tokens), None)
        ids[i, at], mask[i, at] = tokens, 1
    return ids, mask


def make_batch(sequences, *, side="right", extra=0, margin=None):
    batch = {}
    for name, tokens in sequences.items():
        batch[f"input_ids_{name}"], batch[f"attention_mask_{name}"] = padded(tokens, side=side, extra=extra)
    return batch if margin is None else {**batch, "margin": margin}


def make_state(model, tx=SGD):
    return create_state(model, tx)


def numbers(metrics):
    return {name: float(x) for name, x in metrics.items()}


def test_the_loss_is_that_of_the_models_scores(model, sequences):
    batch = make_batch(sequences)
    scores = [
        model.scores(batch[f"input_ids_{s}"], batch[f"attention_mask_{s}"]) for s in ("chosen", "rejected")
    ]
    assert np.std(scores) > 0.01
    loss, expected = jax.jit(partial(pairwise_loss, center_rewards_coefficient=0.1))(*scores)
    state = make_state(model)
    evaluated = numbers(evaluation_step(state, batch))
    assert set(evaluated) == METRICS
    assert evaluated == pytest.approx({**numbers(expected), "loss": float(loss)}, rel=1e-5, abs=1e-6)
    # What is no margin is one of 0, with which all tests have the same program.
    _, stepped = training_step(state, make_batch(sequences, margin=np.zeros(8)))
    assert set(stepped) == METRICS | {"grad_norm"}
    assert {k: float(v) for k, v in stepped.items() if k in METRICS} == pytest.approx(
        evaluated, rel=1e-5, abs=1e-6
    )
    assert batch["input_ids_chosen"].shape != batch["input_ids_rejected"].shape


@pytest.mark.long
def test_nothing_is_donated_the_optimizer_is_called_once_and_the_loss_falls(tiny, model, sequences):
    calls = []
    inner = optax.adamw(1e-2)

    def update(*args, **kwargs):
        calls.append(1)
        return inner.update(*args, **kwargs)

    state = make_state(model, optax.GradientTransformation(inner.init, update))
    before = tiny.leaves(jax.tree.map(np.array, state.params))
    batch = make_batch(sequences)
    first, metrics = training_step(state, batch, gradient_accumulation_steps=4)
    assert calls == [1]  # while tracing; a second call in the program would be a second one here
    second, again = training_step(state, batch, gradient_accumulation_steps=4)
    assert numbers(metrics) == numbers(again)
    for name, leaf in tiny.leaves(state.params).items():
        np.testing.assert_array_equal(leaf, before[name])
        np.testing.assert_array_equal(tiny.leaves(first.params)[name], tiny.leaves(second.params)[name])
    assert optax.tree.get(first.opt_state, "count") == 1
    assert int(first.step) == 1
    assert jax.tree.structure(first.opt_state) == jax.tree.structure(inner.init(state.params))
    following = first
    for _ in range(19):
        following, last = training_step(following, batch, gradient_accumulation_steps=4)
    assert float(last["loss"]) < 0.5 * float(metrics["loss"])


def test_a_nonfinite_update_is_not_applied(tiny, model, sequences):
    state = make_state(model)
    margin = np.zeros(8)
    margin[3] = np.nan
    poisoned, metrics = training_step(state, make_batch(sequences, margin=margin))
    assert np.isnan(float(metrics["loss"]))
    assert int(poisoned.guard) == 0
    for name, leaf in tiny.leaves(poisoned.params).items():
        np.testing.assert_array_equal(leaf, tiny.leaves(state.params)[name])
