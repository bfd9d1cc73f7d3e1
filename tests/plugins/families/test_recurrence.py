"""Layers with a state, against recurrences in float64 NumPy that run each sequence alone, token by token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_families.recurrence import (
    Inputs,
    chunk_paths,
    gated_delta_rule,
    next_state,
    short_convolution,
)

from rlhf_core.models import previous_tokens

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 2, 5, 7


@functools.partial(jax.jit, static_argnames="chunk")
def rule(inputs: Inputs, positions: Any, until: Any, chunk: int) -> Any:
    return gated_delta_rule(inputs, chunk_paths(positions, until, chunk))


def row(
    trees: list[tuple[int, tuple[int, ...]]], time: int
) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Lay out (prefix, branches) as rows do: positions, visible_until, and the indices of every sequence."""
    positions, until, sequences, start = np.zeros(time, np.int32), np.zeros(time, np.int32), [], 0
    for prefix, branches in trees:
        end = start + prefix + sum(branches)
        shared = list(range(start, start + prefix))
        positions[shared], until[shared] = np.arange(prefix), end
        start += prefix
        for branch in branches:
            own = list(range(start, start + branch))
            positions[own], until[own] = prefix + np.arange(branch), start + branch
            sequences.append(shared + own)
            start += branch
    return positions, until, sequences


# A prefix that ends right before a chunk of 16, in its middle, and at its last token; one longer than two chunks; none;
# branches of one token, and longer than a chunk; trees that share a chunk; a tree of one branch.
TREES = [
    [(16, (5, 1, 30, 2)), (3, (4, 4, 4)), (0, (7,))],
    [(40, (3, 20, 1)), (15, (1, 18)), (1, (9, 9))],
    [(0, (50,)), (0, (3,)), (31, (20, 6)), (2, (1, 1, 1, 1))],
]


def inputs(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, list[list[list[int]]]]:
    draw, time = np.random.default_rng(seed), 120
    laid = [row(trees, time) for trees in TREES]
    shape = (len(laid), time)
    k = draw.normal(size=(*shape, KEY_HEADS, KEY))
    values = {
        "q": draw.normal(size=k.shape),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": draw.normal(size=(*shape, KEY_HEADS, VALUE_HEADS, VALUE)),
        "log_decay": -draw.exponential(0.3, size=(*shape, KEY_HEADS, VALUE_HEADS)),
        "beta": draw.uniform(size=(*shape, KEY_HEADS, VALUE_HEADS)),
    }
    positions, until = (np.stack([each[i] for each in laid]) for i in (0, 1))
    return values, positions, until, [each[2] for each in laid]


def alone(values: dict[str, Any], batch: int, sequence: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(outputs of a sequence, its last state), float64."""
    q, k, v, g, beta = (values[name][batch] for name in ("q", "k", "v", "log_decay", "beta"))
    state, out = np.zeros((KEY_HEADS, VALUE_HEADS, KEY, VALUE)), []
    for t in sequence:
        state = state * np.exp(g[t])[..., None, None]
        error = v[t] - np.einsum("kgde,kd->kge", state, k[t])
        state = state + np.einsum("kd,kge->kgde", k[t], error * beta[t][..., None])
        out.append(np.einsum("kgde,kd->kge", state, q[t]))
    return np.array(out), state


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_delta_rule_of_packed_trees_is_that_of_each_sequence_alone(chunk: int) -> None:
    values, positions, until, sequences = inputs()
    single = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    found = np.asarray(rule(Inputs(**single), positions, until, chunk=chunk)[0])
    assert np.isfinite(found).all()
    for batch, several in enumerate(sequences):
        for sequence in several:
            expected, _ = alone(values, batch, sequence)
            np.testing.assert_allclose(found[batch, sequence], expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_each_sequence_alone() -> None:
    values, positions, until, sequences = inputs(1)
    positions, until, sequences = positions[:1], until[:1], sequences[:1]
    single = {name: jnp.asarray(x[:1], jnp.float32) for name, x in values.items()}
    weight = np.random.default_rng(2).normal(size=values["v"].shape).astype(np.float32)

    def packed(values: dict[str, jax.Array]) -> jax.Array:
        out = rule(Inputs(**values), positions, until, chunk=16)[0]
        return sum((out[b, s] * weight[b, s]).sum() for b, several in enumerate(sequences) for s in several)

    def stepped(values: dict[str, jax.Array]) -> jax.Array:
        total = jnp.float32(0)
        for batch, several in enumerate(sequences):
            for sequence in several:
                at = np.array(sequence)
                own = Inputs(**{name: x[batch, at][:, None] for name, x in values.items()})
                empty = jnp.zeros((1, KEY_HEADS, VALUE_HEADS, KEY, VALUE))
                out = jax.lax.scan(lambda s, x: next_state(s, x)[::-1], empty, own)[1]
                total += (out[:, 0] * weight[batch, at]).sum()
        return total

    found, expected = (jax.jit(jax.grad(each))(single) for each in (packed, stepped))
    for name, gradient in expected.items():
        scale = float(np.abs(gradient).max())
        np.testing.assert_allclose(found[name], gradient, atol=1e-5 * scale, rtol=1e-4, err_msg=name)


def test_decoding_goes_on_from_the_last_state() -> None:
    """A prompt that stands at the end of its row, as sampling lays it out, then token after token."""
    values, *_ = inputs(3)
    single = {name: jnp.asarray(x[:1, :40], jnp.float32) for name, x in values.items()}
    positions = np.maximum(np.arange(30) - 7, 0)[None].astype(np.int32)
    until = np.where(np.arange(30) < 7, 0, 30)[None].astype(np.int32)
    prompt = {name: x[:, :30] for name, x in single.items()}
    _, state = rule(Inputs(**prompt), positions, until, chunk=16)
    expected, last = alone(values, 0, list(range(7, 40)))
    for t in range(30, 40):
        out, state = next_state(state, Inputs(**{name: x[:, t] for name, x in single.items()}))
        np.testing.assert_allclose(out[0], expected[t - 7], atol=1e-5)
    np.testing.assert_allclose(state[0], last, atol=1e-5)


def test_the_short_convolution_follows_each_sequence() -> None:
    _, positions, until, sequences = inputs()
    draw = np.random.default_rng(4)
    x, kernel = draw.normal(size=(*positions.shape, 6)), draw.normal(size=(4, 6))
    found = jax.jit(short_convolution)(
        jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32), previous_tokens(positions, until)
    )
    for batch, several in enumerate(sequences):
        for sequence in several:
            own = np.concatenate([np.zeros((3, 6)), x[batch, sequence]])
            expected = sum(kernel[j] * own[j : j + len(sequence)] for j in range(4))
            np.testing.assert_allclose(found[batch, np.array(sequence)], expected, atol=1e-5)
