"""Routers of experts, experts that are spread over a mesh, and the products that compute them."""

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
from rlhf_core.models.experts import ACTIVATIONS, _kernel_gradient, expert_product
from rlhf_core.models.experts_pallas_gpu import expert_rows
from rlhf_core.models.layers import product
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


DRAW = np.random.default_rng(2)
COUNTS = np.array([30, 0, 90], np.int32)


def draw(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(DRAW.normal(size=shape), dtype)


@pytest.mark.parametrize("experts", [False, True])
def test_the_gradient_of_a_kernel_is_float32(experts: bool) -> None:
    """Against float64, from the same bfloat16 inputs: rounding to bfloat16 would be wrong by up to 2⁻⁹."""
    x, d_y = draw(120, 16), draw(120, 8)
    kernel = draw(*((3,) if experts else ()), 16, 8, dtype=jnp.float32)
    parts = np.split(np.arange(120), np.cumsum(COUNTS)[:-1]) if experts else [np.arange(120)]

    def compute(x: Any, kernel: Any) -> Any:
        return (
            expert_product(x, kernel, jnp.asarray(COUNTS))
            if experts
            else product(x, kernel, ("embed", "mlp"))
        )

    y, pull = jax.vjp(compute, x, kernel)
    d_x, d_kernel = pull(d_y)
    assert (y.dtype, d_x.dtype, d_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact = [np.asarray(a, np.float64) for a in (x, kernel.astype(jnp.bfloat16), d_y)]
    kernels = exact[1] if experts else exact[1][None]
    expected = [(exact[0][at] @ k, exact[2][at] @ k.T) for at, k in zip(parts, kernels, strict=True)]
    for found, wanted in zip((y, d_x), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), np.concatenate(wanted), rtol=0.01, atol=0.02
        )
    wanted = np.stack([exact[0][at].T @ exact[2][at] for at in parts])
    np.testing.assert_allclose(d_kernel, wanted if experts else wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_compute_the_products_of_experts(dtype: str) -> None:
    """In interpret mode, against float64: odd sizes, an expert without rows, rows behind the last expert's."""
    draw, counts = np.random.default_rng(0), np.array([37, 0, 5, 21], np.int32)
    used, ids = counts.sum(), np.repeat(np.arange(4), counts)
    x, w, d_y = (draw.normal(size=s).astype(dtype) for s in ((70, 40), (4, 40, 136), (70, 136)))
    wide, kernels, d_wide = (np.asarray(each, np.float64) for each in (x, w, d_y))
    wanted = (
        np.stack([wide[i] @ kernels[e] for i, e in enumerate(ids)]),
        np.stack([d_wide[i] @ kernels[e].T for i, e in enumerate(ids)]),
        *[np.stack([wide[:used][ids == e].T @ d_wide[:used][ids == e] for e in range(4)])] * 2,
    )
    found = (
        expert_rows(x, w, counts, interpret=True)[:used],
        expert_rows(d_y, w, counts, transposed=True, interpret=True)[:used],
        _kernel_gradient(x, d_y, counts, "gpu", interpret=True),
        _kernel_gradient(x, d_y, counts, "tpu", interpret=True),
    )
    rounded = (1, 1, 1e-3, 1e-3) if dtype == "bfloat16" else (1e-3,) * 4
    for a, b, tolerance in zip(found, wanted, rounded, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, rtol=0, atol=5e-3 * tolerance * np.abs(b).max()
        )


def test_the_activation_does_not_cancel() -> None:
    """Its error is relative to its value, and that of its slope likewise, where both are small."""
    x = np.linspace(-5, 5, 1001)
    u, slope = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    sigmoid = 1 / (1 + np.exp(-2 * u))
    y, d_y = x * sigmoid, sigmoid + 2 * x * sigmoid * (1 - sigmoid) * slope
    activation = jax.vmap(jax.value_and_grad(ACTIVATIONS["gelu_pytorch_tanh"]))
    found, d_found = activation(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, y, rtol=1e-5)
    np.testing.assert_allclose(d_found, d_y, rtol=1e-5, atol=2e-7)
