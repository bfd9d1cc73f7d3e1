"""The layout of parameters for decoding on one device: projections of one input are joined."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core.models import DECODER, Decoder, decode_layout
from tests.shared.decoder_configs import CONFIGS

prefill = jax.jit(Decoder.prefill, static_argnums=0)


STATES = CONFIGS["qwen3_5_moe"] | {"layer_types": ["linear_attention"]}


@pytest.mark.parametrize("table", [CONFIGS["qwen2 with windows"], STATES], ids=["attention", "states"])
def test_projections_that_one_device_joins_compute_the_same(
    table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels and biases of one input, those of shared experts too; other experts stay apart."""
    model = DECODER.define(table | {"num_hidden_layers": 1}, "lm")
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
    np.testing.assert_allclose(states, expected, rtol=1e-5, atol=1e-6)
