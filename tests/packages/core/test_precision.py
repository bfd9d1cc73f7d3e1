"""Sums over sequences and the reward head are float32 on every platform, whatever its default for products is."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rlhf_core import PolicyInputs

N, T = 3, 8


def sequence_mean(packed: bool) -> Any:
    def mean(x: jax.Array) -> jax.Array:
        sequence = jnp.zeros((N, T), jnp.int32) if packed else None
        inputs = PolicyInputs(x, x, x, jnp.ones_like(x), sequence=sequence, sequences=4)
        return inputs.sequence_mean(x).sum()

    return mean


def score(tiny: Any) -> Any:
    model = tiny.make_model("score")
    return lambda hidden: model.definition.score(model.params, hidden.astype(jnp.bfloat16)).sum()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("what", ["sequence", "score"])
def test_every_product_is_float32(tiny: Any, what: str, platform: str) -> None:
    function = sequence_mean(packed=True) if what == "sequence" else score(tiny)
    x = jax.ShapeDtypeStruct((N, T) if what == "sequence" else (N, tiny.SIZES["hidden_size"]), jnp.float32)
    for traced in (function, jax.grad(function)):
        text = jax.jit(traced).trace(x).lower(lowering_platforms=(platform,)).as_text()
        products = re.findall(r"stablehlo\.dot_general.*", text)
        assert products or (what == "score" and traced is not function)  # its gradient is a multiplication
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in products), products
