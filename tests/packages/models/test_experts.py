"""Routers of experts, and experts that are spread over a mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.models import DECODER, experts, experts_exchange, paths
from rlhf_core.models.decoder import _parts
from tests.shared.drawn import params_of
from tests.shared.mesh_cases import FAMILIES, SIZES

SCALE = SIZES["initializer_range"]
MIXTRAL, GPT_OSS = (DECODER.define(FAMILIES[name], "lm") for name in ("mixtral", "gpt_oss"))


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
        made = nnx.merge(graph, {**first, "mlp": mlp}).mlp(x)
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
        with experts.recording([None], jnp.ones((2, 5), bool)) as recorder:
            watch = recorder.watch(layer, routes)
            made = layer.mlp(x)
        return made, watch.load

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
    watch = experts.Watch(jnp.asarray(counted), None)
    config: Any = SimpleNamespace(router=router, experts=4)
    watch.see(config, jnp.asarray(logits), jnp.zeros((6, 2), jnp.int32))
    assert watch.load is not None
    score = 1 / (1 + np.exp(-logits)) if router == "sigmoid" else np.exp(logits)
    expected = (score / score.sum(1, keepdims=True))[counted.reshape(-1)].sum(0)
    np.testing.assert_allclose(watch.load.probability, expected, rtol=1e-6)
