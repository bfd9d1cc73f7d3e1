"""Parameters that are not trained have no gradient, no optimizer state and no copy; their values stay."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_core import create_state, optimizers
from rlhf_core.metrics import Mean
from rlhf_core.models import matching, numbered, paths, without_layers
from rlhf_core.step import Accumulated, apply

STACKED = {
    "embed": {"w": jnp.ones(2)},
    "layers": {
        "full": {"mlp": {"w": jnp.ones((1, 2))}, "attn": {"w": jnp.ones((1, 2))}},
        "sliding": {"mlp": {"w": jnp.ones((2, 2))}, "conv1d": {"w": jnp.ones((2, 2))}},
    },
}
STACKS = {"full": SimpleNamespace(layers=(1,)), "sliding": SimpleNamespace(layers=(0, 2))}
MODEL = SimpleNamespace(config=SimpleNamespace(stacks=STACKS))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"layers\.0\.", {"layers.0.mlp.w", "layers.0.conv1d.w"}),
        (r"embed|layers\.[12]\.mlp", {"embed.w", "layers.1.mlp.w", "layers.2.mlp.w"}),
        (
            r"^(embed|layers\.(0|1))\.",
            {"embed.w", *(f"layers.{n}.w" for n in ("0.mlp", "0.conv1d", "1.mlp", "1.attn"))},
        ),
        # The numbers tell which layers, and names alone tell nothing of numbers.
        (r"layers\.(?!2\.)", {f"layers.{n}.w" for n in ("0.mlp", "0.conv1d", "1.mlp", "1.attn")}),
        (r"^layers\.\w+\.(?!mlp)", {"layers.1.attn.w", "layers.0.conv1d.w", "layers.2.conv1d.w"}),
        (r"layers\.0\.mlp|layers\.full", {"layers.0.mlp.w", "layers.1.mlp.w", "layers.1.attn.w"}),
        (
            r"(layers\.sliding\.conv1d|layers\.2)\.",
            {f"layers.{n}.w" for n in ("0.conv1d", "2.conv1d", "2.mlp")},
        ),
        (r"layers\..\.attn", {"layers.1.attn.w"}),
        (r"conv1d", {"layers.0.conv1d.w", "layers.2.conv1d.w"}),
    ],
)
def test_expressions_name_layers_by_number_or_all_of_them(pattern, expected):
    found = matching(STACKED, pattern, MODEL)
    names = {
        name
        for path, leaf in paths(STACKED)
        for name, index in numbered(MODEL, path, leaf)
        if path in found.whole or index in found.layers.get(path, ())
    }
    assert names == expected
    assert not found.absent


@pytest.mark.parametrize(
    ("pattern", "absent"),
    [
        (r"embed|layers\.7\.", [r"layers\.7\."]),
        (r"layers\.(0|9)\.", ["9"]),
        (r"mpl|(embed|nrom)|[|)]|\|", ["mpl", "nrom", "[|)]", r"\|"]),
        (r"layers\.(?!0|9)\d", []),
    ],
)
def test_alternatives_without_a_match_are_told(pattern, absent):
    assert matching(STACKED, pattern, MODEL).absent == [(each, pattern) for each in absent]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model()


@pytest.mark.parametrize("name", ["adamw", pytest.param("adafactor", marks=pytest.mark.long), "muon"])
def test_layers_that_are_not_trained_are_as_if_they_were_not_there(model, name):
    """The others are updated by the optimizer, its averages and the clipping as in a model of them alone."""
    frozen = r"embed|layers\.1\."
    make = getattr(optimizers, name)
    tx = optax.chain(optax.clip_by_global_norm(0.1), make(0.1, weight_decay=0.5))
    state = create_state(model, tx, frozen=frozen)
    draw = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), state.trained().params)
    after, metrics = apply(state.trained(), Accumulated(grads, Mean.of(jnp.ones(1)), {}), by_layer=True)
    own, own_grads = (without_layers(x, state.fixed_layers) for x in (state.trained().params, grads))
    updates, moments = tx.update(own_grads, tx.init(own), own)
    expected = optax.apply_updates(own, updates)
    jax.tree.map(np.testing.assert_array_equal, without_layers(after.params, state.fixed_layers), expected)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, moments)
    assert metrics["grad_norm"].total == optax.tree.norm(own_grads)
    assert "grad_norm/layers.1" not in metrics
    assert state.fixed_layers
    for path, layers in state.fixed_layers:
        assert layers == (1,)
        old, new = (dict(paths(x))[path] for x in (state.params, after.params))
        np.testing.assert_array_equal(new[1], old[1])
        assert not np.array_equal(new[0], old[0])
