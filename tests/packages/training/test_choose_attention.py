"""Which attention a run computes with, and in which blocks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import Component, plugins
from rlhf_core.contracts import ATTENTION
from rlhf_core.errors import InputError
from rlhf_core.fit import attention_skips_blocks
from rlhf_core.mesh import make_mesh, planned_mesh
from rlhf_core.models import DECODER, fresh_model
from rlhf_core.packing import Layout, pack, tree
from rlhf_core.training.choose_attention import (
    FASTER_FROM,
    choose_attention,
    fastest_block,
    visited_share,
    why_kernels,
)
from tests.shared.mesh_cases import FAMILIES
from tests.shared.plans import planned_for


def test_what_rows_visit() -> None:
    """Two sequences of 256: each sees itself, 10 of 16 blocks' pairs of its own; 20 of the row's 36. Long ones: all."""
    tokens = np.arange(256, dtype=np.int32)
    pair = tree([tokens + 1, tokens + 2])
    layout = Layout((512,), (1,), (32,), (0,))
    assert visited_share(pack([pair], layout, group=2), 64) == 20 / 36
    whole = tree([np.arange(512, dtype=np.int32)])
    assert visited_share(pack([whole], layout), 64) == 1.0


def test_blocks_suit_what_rows_hold() -> None:
    """Of a row of 4,096, short sequences are visited in small blocks, one long one in few."""
    layout = Layout((4096,), (1,), (256,), (0,))
    short = [tree([np.full(200, 7, np.int32)]) for _ in range(20)]
    assert fastest_block(pack(short, layout)) == 64
    assert fastest_block(pack([tree([np.full(4096, 7, np.int32)])], layout)) == 256


def test_models_with_sinks_take_what_computes_sinks() -> None:
    model: Any = fresh_model(FAMILIES["gpt_oss"], seed=3)
    stage: Any = SimpleNamespace(name="policy", registry=plugins.load().registry)

    def chosen(name: str) -> Any:
        config: Any = SimpleNamespace(attention=Component(name=name))
        return choose_attention(model, config, stage, [], Layout((64,), (1,), (8,), (0,)))

    assert chosen("pallas").definition.attention is stage.registry.get(ATTENTION, "pallas")
    with pytest.raises(InputError, match=r"stage 'policy'.attention: 'cudnn' cannot compute the sinks"):
        chosen("cudnn")


@pytest.fixture
def eight_gpus() -> Iterator[None]:
    with planned_for("gpu", 8, 76_500_000_000):
        yield


@pytest.mark.usefixtures("eight_gpus")
def test_auto_takes_kernels_where_dense_attention_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of an 8B model, one row per device, layers recomputed: 10.7 GB at 8,192 tokens, 42.9 GB at 16,384."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2}
    table = {"model_type": "llama", "intermediate_size": 64, "vocab_size": 64, **sizes}
    definition = DECODER.define(table, "lm").computing(remat="full")
    mesh = planned_mesh(8, 1, 8)

    def why(time: int, mesh: Any = mesh) -> str | None:
        return why_kernels(definition, Layout((1024, time), (8, 8), (8, 8), (0, 0)), mesh)

    assert why(8192) is None
    assert "42.9 GB of each device" in str(why(16384))
    assert why(16384, planned_mesh(8, 1, 4, 2)) == why(16384)  # twice the rows of half the heads
    assert why(16384, planned_mesh(64, 1, 8, 8)) is None
    monkeypatch.setitem(FASTER_FROM, jax.devices()[0].device_kind, 2048)
    assert "rows of 2048 tokens" in str(why(2048, make_mesh(1, 8, 1)))
    assert why(1024, make_mesh(1, 8, 1)) is None


@pytest.mark.parametrize(
    ("name", "devices", "skips"), [("pallas", 8, True), ("blocks", 8, False), ("blocks", 1, True)]
)
def test_long_rows_suit_what_skips_blocks(name: str, devices: int, skips: bool) -> None:
    config: Any = SimpleNamespace(attention=Component(name=name))
    mesh: Any = planned_mesh(devices)
    assert attention_skips_blocks(config, mesh) is skips
