"""The states of a few tokens, for which the last layer computes nothing else, against those of all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core.plugins import load_file

reference: Any = load_file(Path(__file__).with_name("test_models_reference.py"))
# A prompt with two branches; two sequences; unused slots. Tokens at their ends, one of them twice.
UNTIL = np.array([[12] * 4 + [8] * 4 + [12] * 4 + [0] * 2, [5] * 5 + [12] * 7 + [0] * 2], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 0, 0], [*range(5), *range(7), 0, 0]], np.int32)
AT = np.array([[7, 11, 0], [11, 4, 4]], np.int32)
KEPT = ("smollm3",)
"""Several ropes, of which one turns nothing."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        # Windows and caps; several ropes; fused projections; norms after; layers without rope; experts.
        *(
            (name, {}) if name in KEPT else pytest.param(name, {}, marks=pytest.mark.long)
            for name in ("gemma2", "gemma3", "phi3", "olmo2", "smollm3", "mixtral")
        ),
        ("gemma3", {"remat": "full"}),  # in a loop over layers, where all is computed and read
    ],
    ids=str,
)
def test_value_and_gradient_are_those_of_all_tokens_read_there(name: str, changes: dict[str, Any]) -> None:
    model, params = reference.make(name, **changes)
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
