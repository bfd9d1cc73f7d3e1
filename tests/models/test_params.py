"""Parameters that are not trained have no gradient, no optimizer state and no copy; their values stay."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_core import create_state, optimizers
from rlhf_core.errors import InputError
from rlhf_core.metrics import Mean
from rlhf_core.models.params import join, matching, paths, split
from rlhf_core.step import Programs, split_step
from rlhf_core.training.memory import state_bytes

PARAMS = {"embed": {"w": 1.0}, "layers": {"q": {"kernel": 2.0, "bias": 3.0}, "norm": {"w": 4.0}}}


def test_paths_and_their_split():
    assert [".".join(path) for path, _ in paths(PARAMS)] == [
        "embed.w",
        "layers.q.kernel",
        "layers.q.bias",
        "layers.norm.w",
    ]
    fixed = matching(PARAMS, [r"^embed", "bias$"])
    trained, rest = split(PARAMS, fixed)
    assert trained == {"layers": {"q": {"kernel": 2.0}, "norm": {"w": 4.0}}}
    assert rest == {"embed": {"w": 1.0}, "layers": {"q": {"bias": 3.0}}}
    assert join(trained, rest) == PARAMS
    assert split(PARAMS, frozenset()) == (PARAMS, {})


def test_a_pattern_without_a_match_and_one_that_leaves_nothing():
    with pytest.raises(InputError, match=r"'embd' matches no parameter.*embed"):
        matching(PARAMS, "embd")
    with pytest.raises(InputError, match="nothing would be trained"):
        matching(PARAMS, ["embed", "layers"])


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.make_model()


def objective(definition):
    """The mean of squares of the hidden states: every parameter of the trunk has a gradient."""

    def compute(params, tokens):
        hidden = definition.hidden(params, tokens, tokens, jnp.full_like(tokens, tokens.shape[1]))
        return Mean.of(jnp.square(hidden).mean(-1).reshape(-1) + hidden.sum(-1).reshape(-1)), {}

    return compute


@pytest.mark.long
def test_what_is_fixed_is_neither_copied_nor_changed(model):
    state = create_state(model, optax.adamw(1e-2, weight_decay=0.5), frozen=["embed", "mlp"])
    everywhere = create_state(model, optax.adamw(1e-2, weight_decay=0.5))
    trained = sum(x.nbytes for x in jax.tree.leaves(state.trained().params))
    assert trained < sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert sum(x.nbytes for x in jax.tree.leaves(state.opt_state)) == pytest.approx(2 * trained, rel=1e-3)
    tokens = np.arange(8, dtype=np.int32)[None] % 7
    compute = objective(model.definition)
    update = jax.jit(partial(split_step, compute), static_argnums=2)
    whole, _ = update(everywhere, tokens, 1)
    step = Programs(compute, create_state(tinier(model), state.tx, frozen=["embed", "mlp"]))
    own = create_state(tinier(model), state.tx, frozen=["embed", "mlp"])
    after, _ = step.apply(own, step.accumulate(own, tokens, None))
    halves, _ = update(state, np.concatenate([tokens, tokens]), 2)
    old = dict(paths(own.params | {}))
    for path, leaf in paths(after.params):
        if path in state.fixed:
            assert leaf is old[path]  # the same buffer, never donated
            assert not leaf.is_deleted()
    expected = dict(paths(whole.params))
    for found in (after, halves):
        assert found.fixed == state.fixed
        for path, leaf in paths(found.params):
            if path not in state.fixed:
                np.testing.assert_allclose(leaf, expected[path], rtol=2e-3, atol=2e-6, err_msg=str(path))


def tinier(model):
    """The same model in buffers of its own, which a program may donate."""
    return model.with_params(jax.tree.map(jnp.copy, model.params))


def test_memory_counts_what_is_trained(model):
    tx = optimizers.adamw(1e-3)
    whole, part = (state_bytes(model, tx, frozen) for frozen in (None, "embed"))
    embedding = model.params["embed_tokens"]["embedding"].nbytes
    assert part["parameters"] == whole["parameters"]
    assert part["gradients"] == whole["gradients"] - embedding
    assert part["optimizer"] == pytest.approx(whole["optimizer"] - 2 * embedding, abs=8)
