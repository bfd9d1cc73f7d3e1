"""In which dtype a model computes, and what its backward pass recomputes: neither is another model."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models.decoder import run_layers
from rlhf_core.training import definition_of, saved_bytes
from tests.shared import mesh_cases as cases
from tests.shared.decoder_configs import defined

DEEP = cases.SIZES | {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 192,
    "initializer_range": 0.1,
}
TOKENS = (4, 128)


def test_heads_adapters_and_merging_keep_it(tiny: Any) -> None:
    model = tiny.make_model()
    half = model.computing(dtype="bfloat16").computing(remat="full")
    adapted = half.with_lora(rank=2)
    for each in (half, adapted, half.with_head("score"), adapted.with_head("score"), adapted.merged()):
        model = each.definition
        assert (model.dtype, model.remat) == ("bfloat16", "full")
    other = adapted.computing(remat="dots")
    assert other.definition.lora == adapted.definition.lora
    assert other.definition.remat == "dots"
    assert half.computing() is half
    assert half.computing(dtype="float32", remat="none").definition.dtype == "float32"


def gradient(remat: str, dtype: str = "float32") -> tuple[Any, int]:
    """(the gradient of a loss, the bytes that its program needs beside arguments and results)."""
    definition = defined(DEEP, "lm").computing(dtype=dtype, remat=remat)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 36, TOKENS), jnp.int32)
    places = jnp.broadcast_to(jnp.arange(TOKENS[1], dtype=jnp.int32), TOKENS)

    def loss(params: Any) -> jax.Array:
        hidden = definition.hidden(params, ids, places, jnp.full(TOKENS, TOKENS[1], jnp.int32))
        return jnp.square(hidden.astype(jnp.float32)[..., :3]).sum()

    draw = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: draw.normal(0, 0.1, x.shape).astype(np.float32), definition.abstract_params()
    )
    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    return compiled(params), compiled.memory_analysis().temp_size_in_bytes


def test_what_is_recomputed_changes_memory_and_no_value() -> None:
    (none, most), (dots, fewer), (full, fewest) = map(gradient, ("none", "dots", "full"))
    assert most > 1.5 * fewer
    assert fewer > 1.5 * fewest
    for other in (dots, full):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), other, none
        )


def test_the_forecast_counts_both() -> None:
    def activations(**options: Any) -> int:
        found = definition_of(DEEP, "lm", None, **options)
        assert found is not None
        return saved_bytes(found[0], TOKENS)

    kept = [activations(remat=remat) for remat in ("none", "dots", "full")]
    assert kept[0] > 1.5 * kept[1] > 2 * kept[2]
    assert activations() == kept[0]  # auto: these are small
    assert 0.5 < activations(dtype="bfloat16") / kept[0] < 0.9  # softmax and norms stay float32


@pytest.mark.parametrize(
    ("kinds", "compiled"),
    [("LLLALLLA", 2), ("ABLLALLAB", 5), ("AAAA", 1)],
)
def test_a_pattern_of_layers_is_compiled_once(kinds: str, compiled: int) -> None:
    """Layers run in their order, each with its own parameters, and what each keeps comes in that order."""
    factors = {kind: np.float32(1 + np.arange(kinds.count(kind))) / 4 for kind in sorted({*kinds})}

    def layer(kind: str, x: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * factor + ord(kind), factor

    stacks = {kind: (functools.partial(layer, kind), stack) for kind, stack in factors.items()}
    run = functools.partial(run_layers, kinds, stacks, unroll=False)
    found, kept = jax.jit(run)(jnp.float32(1))
    left, expected, order = {kind: [*stack] for kind, stack in factors.items()}, np.float32(1), []
    for kind in kinds:
        order.append(left[kind].pop(0))
        expected = expected * order[-1] + ord(kind)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(kept, order)

    def layers(jaxpr: Any) -> int:
        inner = [layers(each.params["jaxpr"].jaxpr) for each in jaxpr.eqns if each.primitive.name == "scan"]
        return sum(inner) + sum(each.primitive.name == "mul" for each in jaxpr.eqns)

    assert layers(jax.make_jaxpr(run)(jnp.float32(1)).jaxpr) == compiled
