"""`training_step` on scores that are known: a model whose score is a number looked up by the last attended token.

Losses, gradients and metrics of several updates, as TRL's RewardTrainer does them, are recomputed in float64 NumPy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rlhf_reward import evaluation_step, pairwise_loss, training_step

from rlhf_core import create_state
from rlhf_core.mesh import make_mesh
from rlhf_core.models import Definition, Model


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Lookup(Definition):
    """A model whose score is its last token's entry in a table."""

    vocab_size: int
    hidden_size: int = 1

    def hidden(self, params: Any, tokens: Any, positions: Any, visible_until: Any) -> jax.Array:
        states: jax.Array = params["table"][tokens][..., None]
        return states

    def score(self, params: Any, hidden: jax.Array) -> jax.Array:
        return hidden[..., 0].astype(jnp.float32)


def make_state(table: np.ndarray, tx: optax.GradientTransformation) -> Any:
    """Token i scores table[i]."""
    definition = Lookup(head="score", vocab_size=len(table))
    params = {"table": jnp.asarray(table, jnp.float32)}
    mesh = make_mesh(devices=jax.devices()[:1])
    params = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    return create_state(Model(definition, params, None, {}, None, mesh), tx)


def make_batch(
    last: np.ndarray, *, side: str = "right", width: int = 7, pad: int = 0, margin: Any = None
) -> dict[str, Any]:
    """Pairs of sequences that end in the tokens last [pairs, 2], each of another length; pad is a token, or none."""
    batch: dict[str, Any] = {} if margin is None else {"margin": margin}
    for k, name in enumerate(("chosen", "rejected")):
        ids = np.full((len(last), width), pad, np.int32)
        mask = np.zeros_like(ids)
        for i, token in enumerate(last[:, k]):
            length = 1 + (3 * i + k) % 5
            at = slice(length) if side == "right" else slice(width - length, width)
            mask[i, at], ids[i, at], ids[i, at.stop - 1] = 1, 1, token
        batch |= {f"input_ids_{name}": ids, f"attention_mask_{name}": mask}
    return batch


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(x) for name, x in metrics.items()}


def reference_run(
    table: np.ndarray, batches: Any, rates: np.ndarray, coefficient: float | None
) -> list[dict[str, float]]:
    """Bradley-Terry by AdamW (β 0.9 and 0.999, ε 1e-8, no decay), gradients clipped to norm 1; float64."""
    logged, first, second = [], np.zeros_like(table), np.zeros_like(table)
    for step, ((last, margin), rate) in enumerate(zip(batches, rates, strict=True), 1):
        chosen, rejected = table[last[:, 0]], table[last[:, 1]]
        d = chosen - rejected - margin
        both = np.concatenate([chosen, rejected])
        loss = (np.logaddexp(0, -d) + (coefficient or 0) * (chosen + rejected) ** 2).mean()
        slope, centring = -1 / (1 + np.exp(d)), 2 * (coefficient or 0) * (chosen + rejected)
        gradient = np.zeros_like(table)
        np.add.at(gradient, last[:, 0], (slope + centring) / len(d))
        np.add.at(gradient, last[:, 1], (-slope + centring) / len(d))
        norm = np.linalg.norm(gradient)
        clipped = gradient / max(norm, 1.0)
        first, second = 0.9 * first + 0.1 * clipped, 0.999 * second + 0.001 * clipped**2
        table = table - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        logged.append(
            {
                "loss": loss,
                "grad_norm": norm,
                "accuracy": (chosen > rejected).mean(),
                "margin": (chosen - rejected).mean(),
                "mean_reward": both.mean(),
                "min_reward": both.min(),
                "max_reward": both.max(),
            }
        )
    return logged


@pytest.mark.parametrize(
    ("coefficient", "splits"),
    [pytest.param(None, 1, marks=pytest.mark.long), pytest.param(0.01, 4, marks=pytest.mark.long), (0.5, 2)],
)
def test_a_run_of_several_updates(coefficient: float | None, splits: int) -> None:
    """The logged margin is that of the scores, without the one the loss asks for; `grad_norm` is before clipping."""
    draw = np.random.default_rng(0)
    table, updates = draw.normal(size=24) * 3, 12
    batches = [(draw.integers(0, 24, (8, 2)), draw.exponential(size=8)) for _ in range(updates)]
    rates = 0.3 * (1 - np.arange(updates) / updates)
    expected = reference_run(table, batches, rates, coefficient)
    clipped = [each["grad_norm"] > 1 for each in expected]
    assert any(clipped) if coefficient == 0.5 else not all(clipped)
    schedule = optax.linear_schedule(0.3, 0.0, updates)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))
    state = make_state(table, tx)
    for (last, margin), right in zip(batches, expected, strict=True):
        state, metrics = training_step(
            state,
            make_batch(last, side="left", pad=999, margin=margin[:, None]),
            center_rewards_coefficient=coefficient,
            gradient_accumulation_steps=splits,
        )
        assert {name: float(metrics[name]) for name in right} == pytest.approx(right, rel=2e-5, abs=2e-5)


def test_the_loss_is_that_of_the_models_scores(tiny: Any) -> None:
    """Of a whole model; what is no margin is one of 0."""
    model = tiny.make_model("score", scale=4.0, num_hidden_layers=1)
    last = np.random.default_rng(3).integers(3, 48, (8, 2))
    batch, state = make_batch(last), create_state(model, optax.sgd(1.0))
    scores = [
        model.scores(batch[f"input_ids_{side}"], batch[f"attention_mask_{side}"])
        for side in ("chosen", "rejected")
    ]
    assert np.std(scores) > 0.01
    loss, expected = pairwise_loss(*scores, center_rewards_coefficient=0.1)
    evaluated = numbers(evaluation_step(state, batch, center_rewards_coefficient=0.1))
    assert evaluated == pytest.approx({**numbers(expected), "loss": float(loss)}, rel=1e-5, abs=1e-6)
    unbiased = make_batch(last, margin=np.zeros(8))
    stepped = numbers(training_step(state, unbiased, center_rewards_coefficient=0.1)[1])
    assert {k: v for k, v in stepped.items() if k != "grad_norm"} == pytest.approx(
        evaluated, rel=1e-5, abs=1e-6
    )


def test_a_nonfinite_update_is_not_applied() -> None:
    state = make_state(np.arange(6.0), optax.sgd(1.0))
    batch = make_batch(np.arange(6).reshape(3, 2), margin=np.array([0.0, np.nan, 0.0]))
    poisoned, metrics = training_step(state, batch)
    assert np.isnan(float(metrics["loss"]))
    assert int(poisoned.guard) == 0
    np.testing.assert_array_equal(poisoned.params["table"], state.params["table"])


@dataclass
class LossConfig:
    """As EasyDeL's, which has more."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    break_on_nan: bool = True


def test_the_functions_take_easydel_s_arguments_in_their_order() -> None:
    state, batch = make_state(np.arange(6.0), optax.sgd(1.0)), make_batch(np.arange(6).reshape(3, 2))
    _, plain = training_step(state, batch, None, None, None, 3, 0.5)
    _, ours = training_step(state, batch, gradient_accumulation_steps=3, center_rewards_coefficient=0.5)
    assert numbers(plain) == numbers(ours)
    assert float(plain.loss) == float(plain["loss"])
    with pytest.raises(AttributeError, match="there is no metric 'los'"):
        _ = plain.los
    assert type(jax.jit(lambda metrics: metrics)(plain)) is type(plain)
    assert numbers(evaluation_step(state, batch)) == numbers(evaluation_step(state, batch, None, None, None))
    uncentred = evaluation_step(state, batch, center_rewards_coefficient=0)
    assert float(evaluation_step(state, batch).loss) == float(uncentred.loss)


def test_label_smoothing_of_a_loss_config_acts() -> None:
    state, batch = make_state(np.arange(6.0), optax.sgd(1.0)), make_batch(np.arange(6).reshape(3, 2))
    right = evaluation_step(state, batch, loss={"name": "conservative", "label_smoothing": 0.2})
    for given in ({"label_smoothing": 0.2}, LossConfig(label_smoothing=0.2)):
        assert float(evaluation_step(state, batch, given).loss) == float(right.loss)
    assert float(right.loss) != float(evaluation_step(state, batch, LossConfig()).loss)
    with pytest.warns(
        UserWarning, match="^loss_config: only label_smoothing has an effect here, not z_loss$"
    ):
        evaluation_step(state, batch, {"z_loss": 0.1})
    with pytest.raises(ValueError, match="label_smoothing belongs into `loss`"):
        evaluation_step(state, batch, {"label_smoothing": 0.2}, loss="conservative")
    with pytest.warns(UserWarning, match="^learning_rate_fn: has no effect here: the transformation"):
        training_step(state, batch, None, optax.constant_schedule(0.1))
