"""The load of experts: its metrics, and the loss that balances it, however an update is laid out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import Mean
from rlhf_core.models import DECODER, Model, fresh_model, paths, recording
from rlhf_core.objective import trained_logps, trained_weight, with_experts
from rlhf_core.optimizers import adamw
from rlhf_core.packing import Layout, Packed, pack, tree
from rlhf_core.state import create_state
from rlhf_core.step import Programs
from rlhf_core.training.define import _move_biases
from tests.shared.decoder_configs import FAMILIES as FIELDS
from tests.shared.drawn import params_of
from tests.shared.mesh_cases import FAMILIES, SIZES

WEIGHT = 0.7
ROUTER = ("layers", "mlp", "gate", "kernel")


def objective(definition: Any, params: Any, batch: Packed) -> tuple[Mean, Mapping[str, Any]]:
    logps, _ = trained_logps(definition, params, batch)
    return Mean.of(0.0 * logps, trained_weight(batch)), {}


def mixtral(mesh: Any) -> Model:
    definition = DECODER.define(FAMILIES["mixtral"], "lm")
    params = params_of(definition, 3, SIZES["initializer_range"])
    return Model(definition, jax.device_put(params, definition.shardings(mesh)), None, {}, None, mesh)


def updated(model: Model, batches: list[Packed]) -> tuple[Any, dict[str, float]]:
    """Return the gradient of an update that trains the balance alone, and its metrics."""
    definition = model.definition
    loss = with_experts(lambda p, b: objective(definition, p, b), {"": definition}, {"": WEIGHT})
    state = create_state(model, adamw(0.0))
    programs, done = Programs(loss, state, from_zero=True), None
    counts = programs.count(state, batches)
    for number, batch in enumerate(batches):
        done = programs.accumulate(state, put_rows(model.mesh, batch), done, number, counts)
    assert done is not None
    grads = jax.device_get(done.grads)
    _, metrics = programs.apply(state, done)
    return grads, {name: float(x.result()) for name, x in jax.device_get(metrics).items()}


def reference(model: Model, texts: list[tuple[np.ndarray, ...]]) -> tuple[Any, float, np.ndarray]:
    """Compute gradient, value and loads from padded sequences; a prompt counts with the first of its replies."""
    definition, sequences = model.definition, [(p, r, i) for p, *rs in texts for i, r in enumerate(rs)]
    at = np.broadcast_to(np.arange(12, dtype=np.int32), (len(sequences), 12))
    ids = np.stack([np.pad(np.concatenate([p, r]), (0, 12))[:12] for p, r, _ in sequences])
    ends = np.array([[len(p) + len(r)] for p, r, _ in sequences], np.int32)
    counted = (at < ends) & (at >= np.array([[len(p) * (i > 0)] for p, _, i in sequences]))

    def loads(params: Any) -> Any:
        with recording([definition], jnp.asarray(counted)) as recorder:
            definition.hidden(params, ids, at, np.where(at < ends, ends, 0))
        return recorder.found[0][1]

    pairs = np.asarray(jax.jit(loads)(model.params).pairs, np.float64)
    tokens = len(pairs) * sum(sum(map(len, text)) for text in texts)
    assert pairs.sum() == 2 * tokens
    factor = jnp.asarray(WEIGHT * pairs.shape[1] * pairs.sum(0) / tokens**2, jnp.float32)
    of = jax.jit(jax.value_and_grad(lambda p: (loads(p).probability.sum(0) * factor).sum()))
    value, grads = of(model.params)
    return grads, float(value), pairs


def test_the_balance_does_not_depend_on_how_an_update_is_split() -> None:
    """One micro-batch or several; a group in one row or split over two, which repeat its prompt."""
    draw = np.random.default_rng(0)
    texts = [
        tuple(draw.integers(3, 36, n).astype(np.int32) for n in (5, *draw.integers(2, 7, 3)))
        for _ in range(8)
    ]
    trees = [tree([np.concatenate([p, r]) for r in replies]) for p, *replies in texts]
    grads, value, pairs = reference(mixtral(make_mesh(devices=jax.devices()[:1])), texts)
    assert np.abs(grads["layers"]["mlp"]["gate"]["kernel"]).max() > 1e-3
    for layout in (Layout((48,), (8,), (6,), (24,)), Layout((16,), (4,), (4,), (16,))):
        batches = pack(trees, layout)
        assert any((batch.rows.sequence == -2).any() for batch in batches) == (layout.time == (16,))
        found, metrics = updated(mixtral(make_mesh(2, 2, 2)), batches)
        np.testing.assert_allclose(metrics["loss/router"], value, rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        np.testing.assert_allclose(
            metrics["experts/load_max"], (pairs.max(1) / pairs.mean(1)).max(), rtol=1e-6
        )
        assert metrics["experts/unused"] == (pairs == 0).mean()
        for (path, leaf), (_, wanted) in zip(paths(found), paths(grads), strict=True):
            leaf = leaf.sum(0) if leaf.ndim > wanted.ndim else leaf  # parts of `data`
            size = max(float(np.abs(wanted).max()), 1e-8)
            np.testing.assert_allclose(leaf, wanted, rtol=0, atol=2e-5 * size, err_msg=".".join(path))


def test_only_its_rate_moves_a_routers_correction() -> None:
    """Towards experts with less load than the mean of their layer, by a fixed step; not weight decay."""
    config = SIZES | FIELDS["glm4_moe"] | {"num_hidden_layers": 3}
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 36, n).astype(np.int32) for n in (11, 15, 7, 12)]
    (batch,) = pack([tree([text]) for text in texts], Layout((48,), (1,), (4,), (48,)))

    def moved(rate: float) -> tuple[Any, Any]:
        model = fresh_model(config, seed=3, mesh=make_mesh(devices=jax.devices()[:1]))
        definition = model.definition
        loss = with_experts(lambda p, b: objective(definition, p, b), {"": definition}, {"": 0.0})
        state = create_state(model, adamw(0.1, weight_decay=0.5))
        adjust = partial(_move_biases, {"": definition}, {"": rate}, False)
        programs = Programs(loss, state, adjust=adjust if rate else None)
        done = programs.accumulate(state, put_rows(model.mesh, batch), None)
        load = np.asarray(done.metrics["experts/load_max"].totals)
        state, _ = programs.apply(state, done)
        found = [leaf for path, leaf in paths(state.params) if path[-1] == "e_score_correction_bias"]
        return np.concatenate([np.asarray(leaf) for leaf in found]), load

    still, load = moved(0.0)
    assert load.shape == still.shape == (2, 6)
    np.testing.assert_array_equal(still, np.zeros((2, 6)))
    np.testing.assert_allclose(
        moved(0.25)[0], 0.25 * np.sign(load.mean(-1, keepdims=True) - load), rtol=0, atol=1e-7
    )
