"""Divergences on eight devices: values and gradients of one device, and what the devices send each other."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_distill import DIVERGENCE, Head, token_divergences

from rlhf_core import installed_registry
from rlhf_core.mesh import make_mesh, param_shardings, row_sharding
from tests.shared.sent import sent

ROWS, TOKENS = 8, 5
SHAPE = (2, 2, 2)
"""Of a mesh: data, fsdp, tensor. Whatever has one of them has a part of what this one does."""
COVERING = [(31, 31, None, False), (32, 40, 3, True)]
"""Ids of the student and of the teacher, top_k, and whether kernels are transposed embeddings."""


def problem(ids: int, teacher_ids: int, tied: bool, tokens: int = TOKENS, width: int = 16) -> list[Any]:
    """hidden and weights of a student, and of a wider teacher; a cotangent per token."""
    rng = np.random.default_rng(0)
    arrays = []
    for dim, vocab in ((width, ids), (2 * width, teacher_ids)):
        weights = rng.normal(size=(dim, vocab)).astype(np.float32)
        arrays += [rng.normal(size=(ROWS, tokens, dim)).astype(np.float32), weights.T if tied else weights]
    return [*arrays, rng.normal(size=(ROWS, tokens)).astype(np.float32)]


def step(tied: bool, top_k: int | None, chunk: int, *arrays: Any) -> Any:
    """((total, values), (d_hidden, d_weights)) of the student."""
    hidden, weights, teacher_hidden, teacher_weights, cotangent = arrays

    divergence = installed_registry().get(DIVERGENCE, "jsd", beta=0.25)

    def total(hidden: Any, weights: Any) -> Any:
        kernels = (x.T if tied else x for x in (weights, teacher_weights))
        student, teacher = (Head(h, k, 2.5) for h, k in zip((hidden, teacher_hidden), kernels, strict=True))
        options = {"temperature": 1.3, "top_k": top_k, "chunk": chunk}
        values = token_divergences(divergence, student, teacher, **options)
        return jnp.sum(values * cotangent), values

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(hidden, weights)


@cache
def on_one_device(ids: int, teacher_ids: int, tied: bool, top_k: int | None) -> Any:
    return jax.jit(partial(step, tied, top_k, TOKENS))(*problem(ids, teacher_ids, tied))


def placed(mesh: Any, arrays: Any, tied: bool) -> list[Any]:
    """The shardings of rows, and of weights as parameters are."""
    axes = ("vocab", "embed") if tied else ("embed", "vocab")
    rows = row_sharding(mesh)
    student, teacher = (param_shardings(mesh, axes, arrays[i]) for i in (1, 3))
    return [rows, student, rows, teacher, rows]


def program(mesh: Any, arrays: Any, tied: bool, top_k: int | None, chunk: int) -> Any:
    shardings = placed(mesh, arrays, tied)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(arrays, shardings, strict=True)
    ]
    jitted = jax.jit(partial(step, tied, top_k, chunk), out_shardings=(None, tuple(shardings[:2])))
    return jitted.lower(*shapes).compile()


@pytest.mark.parametrize(("ids", "teacher_ids", "top_k", "tied"), COVERING, ids=str)
def test_values_and_gradients_are_those_of_one_device(
    ids: int, teacher_ids: int, top_k: int | None, tied: bool
) -> None:
    """Chunks of 2 tokens; one device has all in one. It is compared with float64 in test_loss.py."""
    arrays, mesh = problem(ids, teacher_ids, tied), make_mesh(*SHAPE)
    expected = on_one_device(ids, teacher_ids, tied, top_k)
    actual = program(mesh, arrays, tied, top_k, 2)(*jax.device_put(arrays, placed(mesh, arrays, tied)))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def test_heads_are_gathered_once_a_pass_however_many_chunks() -> None:
    ids, tokens, width = 512, 24, 64
    _, _, tensor = SHAPE
    arrays, mesh = problem(ids, ids, False, tokens, width), make_mesh(*SHAPE)
    one, many = (sent(program(mesh, arrays, False, None, chunk)) for chunk in (24, 3))
    heads = 3 * width * ids * 4 / tensor
    # Each of forward and backward gathers both heads; the student's gradient is summed once, after the last chunk.
    assert many.get("all-gather", 0) <= 2 * heads
    assert sum(many.values()) <= sum(one.values())
