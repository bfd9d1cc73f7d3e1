"""Routers of experts, their balance, experts that are spread over a mesh, and the products that compute them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import Mean
from rlhf_core.models import Model, experts, experts_exchange, fresh_model, paths, recording
from rlhf_core.models.decoder import _parts
from rlhf_core.models.layers import product
from rlhf_core.objective import trained_logps, trained_weight, with_experts
from rlhf_core.optimizers import adamw
from rlhf_core.packing import Layout, Packed, pack, tree
from rlhf_core.state import create_state
from rlhf_core.step import Programs
from rlhf_core.training.define import _move_biases
from tests.shared.decoder_configs import FAMILIES as FIELDS
from tests.shared.decoder_configs import defined
from tests.shared.drawn import params_of
from tests.shared.mesh_cases import FAMILIES, SIZES

SCALE = SIZES["initializer_range"]
MIXTRAL, GPT_OSS = (defined(FAMILIES[name], "lm") for name in ("mixtral", "gpt_oss"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_decoded_token_is_routed_in_float32(shared: bool) -> None:
    """Also of a model that computes in bfloat16, by both layouts of the sampler."""
    definition, params = MIXTRAL.computing(dtype="bfloat16"), params_of(MIXTRAL, 3, SCALE)
    parallel = definition.tensor_parallel
    prepared: Any = parallel.prepare(params) if shared else definition.prepare(params)
    layer = nnx.merge(_parts(definition.config, False)[1][""], prepared["layers"][1])
    assert layer.mlp.experts.down_proj.kernel[...].dtype == jnp.bfloat16
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(jnp.bfloat16)
    kernel = np.asarray(params["layers"]["mlp"]["gate"]["kernel"][1], np.float64)
    np.testing.assert_allclose(
        layer.mlp.logits(jnp.asarray(x)), x.astype(np.float64) @ kernel, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exchanged_tokens_give_the_same(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, with biases, where the router sends most tokens to one device: in several rounds."""
    monkeypatch.setattr(experts_exchange, "CAPACITY", 0.5)
    params = params_of(GPT_OSS, 3, SCALE)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8, 6, 16)).astype(dtype)
    graph = _parts(GPT_OSS.config, False)[1][""]
    first = jax.tree.map(lambda leaf: np.asarray(leaf[0]), params["layers"])
    first["mlp"]["gate"]["bias"] = np.array([4, 2, 0, 0], np.float32)
    first["mlp"]["experts"] = jax.tree.map(
        lambda leaf: draw.normal(size=leaf.shape).astype(np.float32), first["mlp"]["experts"]
    )

    def loss(mlp: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = nnx.merge(graph, {**first, "mlp": mlp}).mlp(x)[0]
        return (made.astype(jnp.float32) ** 2).sum(), made

    measure = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    alone = jax.device_get(measure(first["mlp"], x))
    mesh = make_mesh(1, 2, 2, 2)
    shardings = jax.tree.map(
        lambda each: jax.NamedSharding(mesh, jax.P(*each.spec[1:])),
        GPT_OSS.shardings(mesh)["layers"]["mlp"],
    )
    assert shardings["experts"]["gate_up_proj"]["kernel"].spec == jax.P("expert", "fsdp", "tensor")
    found = jax.device_get(measure(jax.device_put(first["mlp"], shardings), put_rows(mesh, x)))
    assert np.abs(alone[1][0]["experts"]["down_proj"]["bias"]).min(0).max() > 0
    both = (paths({"y": made, "d_mlp": d_mlp, "d_x": d_x}) for (_, made), (d_mlp, d_x) in (found, alone))
    for (path, a), (_, b) in zip(*both, strict=True):
        a, b = (np.asarray(each, np.float64) for each in (a, b))
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(), err_msg=".".join(path))


@pytest.mark.parametrize("rows", [1, 127, 300])
def test_rows_are_sorted_by_expert_in_their_order(rows: int) -> None:
    ids = np.random.default_rng(0).choice([0, 1, 3, 4], rows)  # none of expert 2
    order, place, counts = jax.jit(experts_exchange.by_expert, static_argnums=1)(ids, 5)
    np.testing.assert_array_equal(order, np.argsort(ids, kind="stable"))
    np.testing.assert_array_equal(np.asarray(order)[place], np.arange(rows))
    np.testing.assert_array_equal(counts, np.bincount(ids, minlength=5))


@pytest.mark.parametrize("columns", [6, 384])
def test_columns_are_split_by_products_where_slices_are_slow(columns: int) -> None:
    x, *d_y = np.random.default_rng(0).normal(size=(3, 5, columns)).astype(np.float32)
    d_y = [each[:, : columns // 2] for each in d_y]
    (even, odd), back = jax.vjp(lambda x: experts.every_other(x, "tpu"), x)
    np.testing.assert_array_equal(even, x[:, 0::2])
    np.testing.assert_array_equal(odd, x[:, 1::2])
    np.testing.assert_array_equal(back((*map(jnp.asarray, d_y),))[0], np.stack(d_y, 2).reshape(x.shape))


def test_given_routes_are_weighed_by_the_router_that_is_there() -> None:
    """Against the formula in float64; tokens without a route are routed by the router."""
    params = params_of(MIXTRAL, 3, SCALE)
    first = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), params["layers"]["mlp"])
    graph = _parts(MIXTRAL.config, False)[1][""]
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, 5, 16))
    given = np.stack([draw.permutation(4)[:2] for _ in range(10)]).reshape(2, 5, 2)
    given[1, 2:] = -1
    logits = x @ first["gate"]["kernel"]
    own = np.argsort(-logits, axis=-1)[..., :2]
    given[0, :2] = own[0, :2, ::-1]

    @jax.jit
    def run(x: jax.Array, routes: jax.Array) -> Any:
        layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], params["layers"]))
        made, routed = layer.mlp(x, experts.Routing(jnp.ones((2, 5), bool), routes))
        return made, routed.load

    made, load = run(x.astype(np.float32), given.astype(np.int8))
    share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    used = np.where(given < 0, own, given)
    kernels = {name: each["kernel"] for name, each in first["experts"].items()}
    wanted = np.zeros_like(x)
    for b, t in np.ndindex(2, 5):
        weight = share[b, t, used[b, t]] / share[b, t, used[b, t]].sum()
        for e, w in zip(used[b, t], weight, strict=True):
            gate = x[b, t] @ kernels["gate_proj"][e]
            inner = gate / (1 + np.exp(-gate)) * (x[b, t] @ kernels["up_proj"][e])
            wanted[b, t] += w * (inner @ kernels["down_proj"][e])
    np.testing.assert_allclose(made, wanted, atol=1e-5)
    apart = sum(set(own[b, t]) != set(used[b, t]) for b, t in np.ndindex(2, 5))
    assert 0 < apart < 7
    assert load.replayed.tolist() == [7, apart]
    assert load.pairs.tolist() == np.bincount(used.reshape(-1), minlength=4).tolist()


@pytest.mark.parametrize(("count", "dtype"), [(127, "int8"), (128, "int8"), (129, "int16"), (256, "int16")])
def test_routes_hold_the_number_of_every_expert(
    count: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers from 0 to count - 1, and -1 where the router chooses."""
    monkeypatch.setattr(experts, "expert_count", lambda definition: count)
    shape = experts.route_shape(MIXTRAL)
    assert shape is not None
    assert shape.dtype == dtype
    assert np.iinfo(shape.dtype).max >= count - 1


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
def test_a_token_counts_once_in_the_probabilities_of_experts(router: str) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4)).astype(np.float32)
    counted = np.array([[True, True, False], [True, True, True]])
    config: Any = SimpleNamespace(router=router, experts=4)
    asked = experts.Routing(jnp.asarray(counted), None)
    load = asked.follow(config, jnp.asarray(logits), jnp.zeros((6, 2), jnp.int32)).load
    assert load is not None
    score = 1 / (1 + np.exp(-logits)) if router == "sigmoid" else np.exp(logits)
    expected = (score / score.sum(1, keepdims=True))[counted.reshape(-1)].sum(0)
    np.testing.assert_allclose(load.probability, expected, rtol=1e-6)


DRAW = np.random.default_rng(2)
COUNTS = np.array([30, 0, 90], np.int32)


def draw(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(DRAW.normal(size=shape), dtype)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_gradient_of_a_kernel_is_float32(grouped: bool) -> None:
    """Against float64, from the same bfloat16 inputs: rounding to bfloat16 would be wrong by up to 2⁻⁹."""
    x, d_y = draw(120, 16), draw(120, 8)
    kernel = draw(*((3,) if grouped else ()), 16, 8, dtype=jnp.float32)
    parts = np.split(np.arange(120), np.cumsum(COUNTS)[:-1]) if grouped else [np.arange(120)]

    def compute(x: Any, kernel: Any) -> Any:
        return (
            experts.expert_product(x, kernel, jnp.asarray(COUNTS))
            if grouped
            else product(x, kernel, ("embed", "mlp"))
        )

    y, pull = jax.vjp(compute, x, kernel)
    d_x, d_kernel = pull(d_y)
    assert (y.dtype, d_x.dtype, d_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = [np.asarray(a, np.float64) for a in (x, kernel.astype(jnp.bfloat16), d_y)]
    kernels = exact[1] if grouped else exact[1][None]
    expected = [(exact[0][at] @ k, exact[2][at] @ k.T) for at, k in zip(parts, kernels, strict=True)]
    for found, wanted in zip((y, d_x), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), np.concatenate(wanted), rtol=0.01, atol=0.02
        )
    wanted = np.stack([exact[0][at].T @ exact[2][at] for at in parts])
    np.testing.assert_allclose(d_kernel, wanted if grouped else wanted[0], rtol=1e-5, atol=1e-5)


def test_the_activation_does_not_cancel() -> None:
    """Its error is relative to its value, and that of its slope likewise, where both are small."""
    x = np.linspace(-5, 5, 1001)
    u, slope = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    sigmoid = 1 / (1 + np.exp(-2 * u))
    y, d_y = x * sigmoid, sigmoid + 2 * x * sigmoid * (1 - sigmoid) * slope
    activation = jax.vmap(jax.value_and_grad(experts.ACTIVATIONS["gelu_pytorch_tanh"]))
    found, d_found = activation(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, y, rtol=1e-5)
    np.testing.assert_allclose(d_found, d_y, rtol=1e-5, atol=2e-7)


WEIGHT = 0.7


def objective(definition: Any, params: Any, batch: Packed) -> tuple[Mean, Mapping[str, Any]]:
    logps, _ = trained_logps(definition, params, batch)
    return Mean.of(0.0 * logps, trained_weight(batch)), {}


def mixtral(mesh: Any) -> Model:
    definition = defined(FAMILIES["mixtral"], "lm")
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
