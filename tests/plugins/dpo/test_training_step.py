"""training_step and evaluation_step: the whole model in float64, and the reference that they are given."""

import jax
import numpy as np
import optax
import pytest
from rlhf_dpo import completion_logps, evaluation_step, training_step

from rlhf_core import create_state
from tests.shared.samplers import full_logps

SGD = optax.sgd(1.0)
"""One object for all tests, as it is a part of what a compiled step is found by; so are β and the batches' sizes."""
BETA = 0.2
METRICS = {f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")}
METRICS |= {"logps/chosen", "logps/rejected", "loss"}
SIDES = ("chosen", "rejected")


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model(scale=4.0, num_hidden_layers=1)


@pytest.fixture(scope="module")
def sequences():
    """{side: [(ids, index of the first completion token)]}, prompts in common."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 48, n) for n in rng.integers(1, 6, 8)]
    return {
        side: [
            (np.concatenate([p, rng.integers(3, 48, n)]), len(p))
            for p, n in zip(prompts, counts, strict=True)
        ]
        for side, counts in (("chosen", rng.integers(1, 6, 8)), ("rejected", rng.integers(1, 9, 8)))
    }


def make_batch(sequences, *, side="right", extra=0):
    rng = np.random.default_rng(5)
    batch = {}
    for name, rows in sequences.items():
        width = max(len(ids) for ids, _ in rows) + extra
        shape = len(rows), width
        ids, seen, own = np.full(shape, 7, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for i, (tokens, start) in enumerate(rows):
            first = 0 if side == "right" else width - len(tokens)
            ids[i, first : first + len(tokens)] = tokens
            seen[i, first : first + len(tokens)] = 1
            own[i, first + start : first + len(tokens)] = 1
        batch |= {f"input_ids_{name}": ids, f"attention_mask_{name}": seen, f"completion_mask_{name}": own}
        batch[f"ref_logps_{name}"] = -18.0 + rng.normal(size=len(rows)).astype(np.float32)
    return batch


def expected_logps(model, params, rows):
    """Compute the log-probability of each completion in float64, from the model's logits of it alone."""
    return np.array(
        [full_logps(model.definition, params, ids[:start], ids[start:]).sum() for ids, start in rows]
    )


def expected_loss(model, params, sequences, batch, kind, beta):
    if kind == "orpo":
        logps = {side: expected_logps(model, params, sequences[side]) for side in SIDES}
        means = {side: logps[side] / [len(ids) - start for ids, start in sequences[side]] for side in SIDES}
        odds = {side: mean - np.log(-np.expm1(mean)) for side, mean in means.items()}
        return (-means["chosen"] + 0.1 * np.logaddexp(0, odds["rejected"] - odds["chosen"])).mean()
    ratio = {
        side: expected_logps(model, params, sequences[side]) - batch[f"ref_logps_{side}"].astype(np.float64)
        for side in SIDES
    }
    return np.logaddexp(0, -beta * (ratio["chosen"] - ratio["rejected"])).mean()


def make_state(model):
    return create_state(model, SGD)


def numbers(metrics):
    return {name: float(x) for name, x in metrics.items()}


def test_loss_and_gradient_equal_the_definition(tiny, model, sequences):
    """With plain descent at rate 1 the parameters move by the gradient; along it the float64 loss has that slope.

    Nothing is donated.
    """
    before = tiny.leaves(jax.tree.map(np.array, model.params))
    batch, state = make_batch(sequences), make_state(model)
    following, metrics = training_step(state, batch, beta=BETA, loss_type="sigmoid")
    for name, leaf in tiny.leaves(model.params).items():
        np.testing.assert_array_equal(leaf, before[name])
    assert set(metrics) == METRICS | {"grad_norm"}
    expected = expected_loss(model, state.params, sequences, batch, "sigmoid", BETA)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    moved = jax.tree.map(lambda a, b: np.asarray(a - b, np.float64), state.params, following.params)
    size = np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(moved)))
    assert size > 1e-3
    assert float(metrics["grad_norm"]) == pytest.approx(size, rel=1e-3)

    def loss(step):
        params = jax.tree.map(lambda p, m: (p + step * m / size).astype(np.float32), state.params, moved)
        return expected_loss(model, params, sequences, batch, "sigmoid", BETA)

    assert (loss(1e-3) - loss(-1e-3)) / 2e-3 == pytest.approx(size, rel=5e-3)


def test_a_loss_without_a_reference_takes_none_and_does_not_depend_on_the_splits(tiny, model, sequences):
    batch, state = make_batch(sequences), make_state(model)
    batch = {name: x for name, x in batch.items() if not name.startswith("ref")}
    whole, metrics = training_step(state, batch, loss_type="orpo")
    split, again = training_step(state, batch, loss_type="orpo", gradient_accumulation_steps=4)
    assert set(metrics) == METRICS | {"grad_norm", "orpo/nll", "orpo/accuracies"}
    expected = expected_loss(model, state.params, sequences, batch, "orpo", BETA)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert numbers(again) == pytest.approx(numbers(metrics), rel=1e-5)
    others = tiny.leaves(split.params)
    for name, leaf in tiny.leaves(whole.params).items():
        np.testing.assert_allclose(others[name], leaf, atol=1e-6, err_msg=name)
    with pytest.raises(ValueError, match="batch lacks ref_logps_chosen, ref_logps_rejected"):
        training_step(state, batch, loss_type="sigmoid")


def test_the_reference_is_read_by_the_same_rule(model, sequences):
    """With the policy's own log-probabilities as reference every implicit reward is 0."""
    batch = make_batch(sequences)
    own = {
        f"ref_logps_{s}": completion_logps(
            model, *(batch[f"{part}_{s}"] for part in ("input_ids", "attention_mask", "completion_mask"))
        )
        for s in SIDES
    }
    for side in SIDES:
        np.testing.assert_allclose(
            own[f"ref_logps_{side}"], expected_logps(model, model.params, sequences[side]), rtol=1e-5
        )
    metrics = numbers(evaluation_step(make_state(model), batch | own, beta=BETA))
    assert metrics["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(0, abs=1e-5)
