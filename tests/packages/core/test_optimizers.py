"""Every optimizer matches its formula in float64; all share weight decay and clipping; a registered one works."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from rlhf_core import OPTIMIZER, optimizers, plugins
from rlhf_core.config import TrainerConfig
from rlhf_core.optimizers import adafactor, adamw, lion, muon, sgd

RATE, DECAY, STEPS = 0.1, 0.5, 4
DRAW = np.random.default_rng(0)
PARAMS = {
    "embed_tokens": {"embedding": DRAW.normal(size=(7, 4))},
    "layers": {
        "mlp": {"kernel": DRAW.normal(size=(2, 4, 6)), "bias": DRAW.normal(size=(2, 6))},
        "norm": {"weight": DRAW.normal(size=(2, 4))},
    },
    "score": {"kernel": DRAW.normal(size=(4, 1))},
}
NAMES = {
    "embed_tokens.embedding": True,
    "layers.mlp.kernel": True,
    "layers.mlp.bias": False,
    "layers.norm.weight": False,
    "score.kernel": True,
}
"""Whether weight decay applies."""


def flat(tree: Any) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def gradients() -> list[Any]:
    draw = np.random.default_rng(1)
    return [jax.tree.map(lambda x: draw.normal(size=x.shape), PARAMS) for _ in range(STEPS)]


def after(tx: optax.GradientTransformation, given: list[Any]) -> dict[str, np.ndarray]:
    """Return the parameters after the updates."""
    params = jax.tree.map(lambda x: jax.numpy.asarray(x, "float32"), PARAMS)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for each in given:
        step, state = update(jax.tree.map(lambda x: jax.numpy.asarray(x, "float32"), each), state, params)
        params = optax.apply_updates(params, step)
    return flat(params)


def expected(direction: Any, given: list[Any]) -> dict[str, np.ndarray]:
    """Apply a rule (gradient, memory, update from 1) → direction, with decoupled weight decay."""
    params, memories = flat(PARAMS), {name: {} for name in NAMES}
    for count, each in enumerate(given, 1):
        for name, gradient in flat(each).items():
            step = direction(gradient, memories[name], count)
            decay = DECAY * params[name] if NAMES[name] else 0.0
            params[name] = params[name] - RATE * (step + decay)
    return params


def adam_rule(g: np.ndarray, memory: dict, count: int) -> np.ndarray:
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g**2
    return memory["m"] / (1 - 0.9**count) / (np.sqrt(memory["v"] / (1 - 0.999**count)) + 1e-8)


def lion_rule(g: np.ndarray, memory: dict, count: int) -> np.ndarray:
    step = np.sign(0.9 * memory.get("m", 0) + 0.1 * g)
    memory["m"] = 0.99 * memory.get("m", 0) + 0.01 * g
    return step


def momentum_rule(g: np.ndarray, memory: dict, count: int) -> np.ndarray:
    memory["m"] = 0.8 * memory.get("m", 0) + g
    return memory["m"]


def adafactor_rule(g: np.ndarray, memory: dict, count: int) -> np.ndarray:
    """Adafactor for arrays too small to be factored; the root mean square of an update is at most 1."""
    kept = 1 - count**-0.8
    memory["v"] = kept * memory.get("v", 0) + (1 - kept) * (g**2 + 1e-30)
    step = g / np.sqrt(memory["v"])
    return step / max(1.0, float(np.sqrt(np.mean(step**2))))


@pytest.mark.parametrize(
    ("tx", "rule"),
    [
        (adamw(RATE, weight_decay=DECAY), adam_rule),
        (lion(RATE, weight_decay=DECAY), lion_rule),
        (sgd(RATE, weight_decay=DECAY), lambda g, memory, count: g),
        (sgd(RATE, weight_decay=DECAY, momentum=0.8), momentum_rule),
        (adafactor(RATE, weight_decay=DECAY), adafactor_rule),
    ],
    ids=["adamw", "lion", "sgd", "sgd with momentum", "adafactor"],
)
def test_the_formula(tx: optax.GradientTransformation, rule: Any) -> None:
    given = gradients()
    found = after(tx, given)
    for name, leaf in expected(rule, given).items():
        np.testing.assert_allclose(found[name], leaf, rtol=2e-5, atol=2e-6, err_msg=name)


def test_muon_orthogonalises_each_layers_matrix_and_nothing_else() -> None:
    (first, *_), before = gradients(), flat(PARAMS)
    found = after(muon(RATE, weight_decay=0.0), [first])
    moved = {name: (before[name] - found[name]) / RATE for name in NAMES}
    for layer, gradient in zip(moved["layers.mlp.kernel"], first["layers"]["mlp"]["kernel"], strict=True):
        left, _, right = np.linalg.svd(gradient, full_matrices=False)
        values = np.diag(left.T @ layer @ right.T) / (0.2 * np.sqrt(6))  # of 4 × 6
        assert np.all((values > 0.6) & (values < 1.3)), values
        np.testing.assert_allclose(layer, left @ np.diag(values * 0.2 * np.sqrt(6)) @ right, atol=1e-5)
        assert np.sqrt(np.mean(layer**2)) == pytest.approx(0.2, rel=0.3)
    for name in set(NAMES) - {"layers.mlp.kernel"}:  # Adam's first step
        np.testing.assert_allclose(np.abs(moved[name]), 1.0, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_the_configs_decay_reaches_every_optimizer(name: str) -> None:
    registry, still = plugins.load().registry, [jax.tree.map(np.zeros_like, PARAMS)]
    before = flat(PARAMS)
    for given, decay in (({}, 0.01), ({"weight_decay": DECAY}, DECAY)):
        config = TrainerConfig(optimizer=name, learning_rate=RATE, **given)
        tx, _ = optimizers.make_optimizer(config, registry, 10)
        found = after(tx, still)
        for path, applies in NAMES.items():
            left = 1 - RATE * decay * applies
            np.testing.assert_allclose(found[path], before[path] * left, rtol=1e-5, err_msg=f"{name} {path}")


def test_a_registered_one_with_its_options_and_the_schedule() -> None:
    registry = plugins.load().registry
    seen = {}

    def signed(learning_rate: Any, *, scale: float = 1.0) -> optax.GradientTransformation:
        seen["rate"] = learning_rate
        return optax.chain(
            optax.stateless(lambda updates, _: jax.tree.map(lambda g: scale * jax.numpy.sign(g), updates)),
            optax.scale_by_learning_rate(learning_rate),
        )

    registry.add(OPTIMIZER, "signed", signed)
    config = TrainerConfig(
        optimizer={"name": "signed", "scale": 2.0}, learning_rate=RATE, scheduler="linear", weight_decay=DECAY
    )
    tx, rate = optimizers.make_optimizer(config, registry, 10)
    given, before = gradients()[:1], flat(PARAMS)
    found = after(tx, given)
    assert seen["rate"] is rate
    for name, gradient in flat(given[0]).items():  # it takes no weight_decay, so it is given none
        np.testing.assert_allclose(found[name], before[name] - RATE * 2.0 * np.sign(gradient), rtol=1e-5)


@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_gradients_are_clipped_by_their_global_norm(limit: float | None) -> None:
    registry, given, before = plugins.load().registry, gradients()[:1], flat(PARAMS)
    config = TrainerConfig(optimizer="sgd", learning_rate=RATE, weight_decay=0.0, max_grad_norm=limit)
    found = after(optimizers.make_optimizer(config, registry, 10)[0], given)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in flat(given[0]).values()))
    scale = 1.0 if limit is None else min(1.0, limit / norm)
    for name, gradient in flat(given[0]).items():
        np.testing.assert_allclose(found[name], before[name] - RATE * scale * gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [2**31 - 1, 2**31, 2**63])
def test_a_warmup_longer_than_any_run_has_a_rate(name: str, warmup: int) -> None:
    """Steps are int32, and neither the warmup nor the run need be."""
    rate = optimizers.schedule(name, 1.0, 2 * warmup, warmup=warmup)
    assert float(jax.jit(rate)(np.int32(9))) == pytest.approx(10 / warmup)
