"""The decoder against one in float64 NumPy, decoder_reference.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models import DECODER, Decoder
from tests.shared import decoder_reference as reference
from tests.shared.decoder_configs import CONFIGS

hidden = jax.jit(Decoder.hidden, static_argnums=0)


def make(name: str, **changes: Any) -> tuple[Decoder, dict[str, Any]]:
    """A model and parameters in which nothing is 0 or 1, so that no term can be left out unnoticed.

    Norms and biases have a mean other than 0, matrices have not: deep layers would see one direction only.
    """
    model = DECODER.define(CONFIGS[name], "lm").computing(**changes)
    draw = np.random.default_rng(0)

    def value(path: Any, leaf: Any) -> jax.Array:
        mean = 0.0 if path[-1].key in ("kernel", "embedding") else 0.2
        return jnp.asarray(mean + 0.3 * draw.standard_normal(leaf.shape), jnp.float32)

    return model, jax.tree.map_with_path(value, model.abstract_params())


SECOND = ("llama", "linear rope", "qwen2")
"""Of which other configs have every term: gemma3 a linear rope, "qwen2 with windows" the biases."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if name in SECOND else name
        for name in CONFIGS
        if name != "lfm2"  # which is lfm2_moe without experts
    ],
)
def test_hidden_and_head_equal_the_reference(name: str) -> None:
    model, params = make(name)
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, model.vocab_size, (2, 14)).astype(np.int32)
    # Row 0: unused, then a tree of a prompt of 4 and branches of 3 and 4. Row 1: two sequences, then unused.
    until = np.array([[0] + [12] * 4 + [8] * 3 + [12] * 4 + [0] * 2, [5] * 5 + [12] * 7 + [0] * 2], np.int32)
    positions = np.array([[0, 0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 0, 0], [*range(5), *range(7), 0, 0]], np.int32)
    used = until > 0
    found = np.asarray(hidden(model, params, tokens, positions, until))
    assert np.isfinite(found).all()
    for row in range(2):
        seen = reference.visible(until[row])
        expected = reference.hidden(CONFIGS[name], params, tokens[row], positions[row], seen)
        bound = 2e-4 if "qwen3_5" in name else 2e-5  # short keys are normalised
        np.testing.assert_allclose(found[row][used[row]], expected[used[row]], rtol=2e-4, atol=bound)
    kernel, cap = model.unembedding(params)
    assert cap == CONFIGS[name].get("final_logit_softcapping")
    source = params["embed_tokens"]["embedding"].T if model.config.tied else params["lm_head"]["kernel"]
    np.testing.assert_array_equal(kernel, source / CONFIGS[name].get("logits_scaling", 1.0))


def test_rows_that_see_nothing_have_a_finite_gradient() -> None:
    model, params = make("llama")
    zeros = np.zeros((2, 6), np.int32)
    loss = jax.jit(jax.value_and_grad(lambda p: model.hidden(p, zeros, zeros, zeros).sum()))
    value, gradient = loss(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_the_reward_head_and_the_initial_values() -> None:
    model = DECODER.define(CONFIGS["llama"] | {"initializer_range": 0.05}, "score")
    params = jax.jit(model.init)(jax.random.key(0))
    assert "lm_head" not in params
    assert params["score"]["kernel"].shape == (24, 1)
    states = np.random.default_rng(0).standard_normal((3, 2, 24)).astype(np.float32)
    found = model.score(params, jnp.asarray(states, jnp.bfloat16))
    assert found.dtype == jnp.float32
    rounded = np.asarray(jnp.asarray(states, jnp.bfloat16), np.float64)
    np.testing.assert_allclose(
        found, rounded @ np.asarray(params["score"]["kernel"], np.float64)[:, 0], rtol=1e-4, atol=1e-6
    )
    gate = np.asarray(params["layers"]["mlp"]["gate_proj"]["kernel"])
    assert abs(gate.std() - 0.05) < 0.002
    assert abs(gate[0] - gate[1]).max() > 0.05  # layers differ
    assert (np.asarray(params["norm"]["weight"]) == 1).all()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_bfloat16_computes_in_bfloat16_with_float32_parameters() -> None:
    model, params = make("qwen3", dtype="bfloat16")
    tokens = np.arange(9, dtype=np.int32)[None]
    until = np.full((1, 9), 9, np.int32)

    def loss(p: Any) -> tuple[jax.Array, jax.Array]:
        states = model.hidden(p, tokens, tokens, until)
        return states.sum().astype(jnp.float32), states

    gradient, half = jax.jit(jax.grad(loss, has_aux=True))(params)
    whole = hidden(model.computing(dtype="float32"), params, tokens, tokens, until)
    assert half.dtype == jnp.bfloat16
    assert whole.dtype == jnp.float32
    difference = np.abs(np.asarray(half, np.float32) - np.asarray(whole))
    assert 0 < difference.max() < 0.2
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
