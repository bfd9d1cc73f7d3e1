"""The decoder, also as one device decodes with it, against one in float64 NumPy, decoder_reference.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.models import Decoder, decode_layout
from tests.shared import decoder_reference as reference
from tests.shared.decoder_configs import CONFIGS, defined

hidden = jax.jit(Decoder.hidden, static_argnums=0)
# Row 0: unused, then a tree of a prompt of 4 and branches of 3 and 4. Row 1: two sequences, then unused.
UNTIL = np.array([[0] + [12] * 4 + [8] * 3 + [12] * 4 + [0] * 2, [5] * 5 + [12] * 7 + [0] * 2], np.int32)
POSITIONS = np.array([[0, 0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 0, 0], [*range(5), *range(7), 0, 0]], np.int32)
AT = np.array([[7, 11, 1], [11, 4, 4]], np.int32)
"""Tokens at ends, one of them twice."""


def make(name: str, **changes: Any) -> tuple[Decoder, dict[str, Any]]:
    """A model and parameters in which nothing is 0 or 1, so that no term can be left out unnoticed.

    Norms and biases have a mean other than 0, matrices have not: deep layers would see one direction only.
    """
    model = defined(CONFIGS[name], "lm").computing(**changes)
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
    used = UNTIL > 0
    found = np.asarray(hidden(model, params, tokens, POSITIONS, UNTIL))
    assert np.isfinite(found).all()
    for row in range(2):
        seen = reference.visible(UNTIL[row])
        expected = reference.hidden(CONFIGS[name], params, tokens[row], POSITIONS[row], seen)
        bound = 2e-4 if "qwen3_5" in name else 2e-5  # short keys are normalised
        np.testing.assert_allclose(found[row][used[row]], expected[used[row]], rtol=2e-4, atol=bound)
    kernel, cap = model.unembedding(params)
    assert cap == CONFIGS[name].get("final_logit_softcapping")
    source = params["embed_tokens"]["embedding"].T if model.config.tied else params["lm_head"]["kernel"]
    np.testing.assert_array_equal(kernel, source / CONFIGS[name].get("logits_scaling", 1.0))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # Windows and caps; several ropes; fused projections; norms after; layers without rope; experts.
        *(
            (name, {}) if name == "smollm3" else pytest.param(name, {}, marks=pytest.mark.long)
            for name in ("gemma2", "gemma3", "phi3", "olmo2", "smollm3", "mixtral")
        ),
        ("gemma3", {"remat": "full"}),  # in a loop over layers, where all is computed and read
    ],
    ids=str,
)
def test_a_few_tokens_have_the_values_and_gradients_of_all(name: str, changes: dict[str, Any]) -> None:
    """For whose states the last layer computes nothing else."""
    model, params = make(name, **changes)
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, model.vocab_size, (2, 14)).astype(np.int32)
    weight = draw.standard_normal((2, 3, model.hidden_size)).astype(np.float32)

    def few(p: Any) -> tuple[jax.Array, jax.Array]:
        states = model.hidden_at(p, tokens, POSITIONS, UNTIL, jnp.asarray(AT))
        return (states * weight).sum(), states

    def read(p: Any) -> tuple[jax.Array, jax.Array]:
        states = model.hidden(p, tokens, POSITIONS, UNTIL)
        states = jnp.stack([states[row, AT[row]] for row in range(2)])
        return (states * weight).sum(), states

    (_, states), gradient = jax.jit(jax.value_and_grad(few, has_aux=True))(params)
    (_, expected), wanted = jax.jit(jax.value_and_grad(read, has_aux=True))(params)
    assert states.shape == (2, 3, model.hidden_size)
    np.testing.assert_allclose(states, expected, rtol=1e-4, atol=1e-5)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(other).max() + 1e-6
        np.testing.assert_allclose(leaf, other, rtol=1e-3, atol=1e-4 * scale, err_msg=str(path))


def test_the_reward_head_and_the_initial_values() -> None:
    model = defined(CONFIGS["llama"] | {"initializer_range": 0.05}, "score")
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


prefill = jax.jit(Decoder.prefill, static_argnums=0)


STATES = CONFIGS["qwen3_5_moe"] | {"layer_types": ["linear_attention"]}


@pytest.mark.parametrize("table", [CONFIGS["qwen2 with windows"], STATES], ids=["attention", "states"])
def test_projections_that_one_device_joins_compute_the_same(
    table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels and biases of one input, those of shared experts too; other experts stay apart."""
    model = defined(table | {"num_hidden_layers": 1}, "lm")
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), model.abstract_params())
    apart = model.prepare(params)
    monkeypatch.setattr(decode_layout, "device_count", lambda: 1)
    joined = model.prepare(params)
    (before,), (layer,) = apart["layers"], joined["layers"]
    if table is STATES:
        assert set(layer["mlp"]["shared_expert"]) == {"gate_up_proj", "down_proj"}
        jax.tree.map(np.testing.assert_array_equal, layer["mlp"]["experts"], before["mlp"]["experts"])
    else:
        assert set(layer["self_attn"]) == {"qkv_proj", "o_proj"}
        assert set(layer["mlp"]) == {"gate_up_proj", "down_proj"}
    tokens, until = draw.integers(0, 31, (2, 5)).astype(np.int32), np.full((2, 5), 5, np.int32)
    positions = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    states, expected = (prefill(model, each, tokens, positions, until)[0] for each in (joined, apart))
    np.testing.assert_allclose(states, expected, rtol=1e-5, atol=3e-6)
