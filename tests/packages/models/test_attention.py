"""Every attention equals the definition: softmax over the keys that a query sees, value and gradient, in float64.

And which attention a run computes with, in which blocks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import Component, plugins
from rlhf_core.contracts import ATTENTION
from rlhf_core.errors import InputError
from rlhf_core.fit import attention_skips_blocks
from rlhf_core.mesh import make_mesh, planned_mesh
from rlhf_core.models import fresh_model, in_blocks
from rlhf_core.packing import Layout, pack, tree
from rlhf_core.plugins import installed_registry
from rlhf_core.training.choose_attention import (
    FASTER_FROM,
    choose_attention,
    fastest_block,
    visited_share,
    why_kernels,
)
from tests.shared.decoder_configs import defined
from tests.shared.mesh_cases import FAMILIES
from tests.shared.plans import planned_for

ROWS, KV_HEADS, GROUPS, SIZE = 2, 2, 2, 4
REGISTRY = installed_registry()
WAYS = {
    "xla": REGISTRY.get(ATTENTION, "xla"),
    "blocks": REGISTRY.get(ATTENTION, "blocks"),
    "blocks of 32": in_blocks(32),
    "cudnn": REGISTRY.get(ATTENTION, "cudnn", implementation="xla"),
}


def trees(time: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and visible_until of two rows: a prompt with three branches, then unused; three sequences."""
    first = np.zeros((2, time), np.int32)
    prompt, end = time // 5, time - 3
    cuts = np.linspace(prompt, end, 4).astype(int)
    first[0, :prompt], first[1, :prompt] = np.arange(prompt), end
    for start, stop in itertools.pairwise(cuts):
        first[0, start:stop], first[1, start:stop] = np.arange(stop - start) + prompt, stop
    second = np.zeros((2, time), np.int32)
    cuts = np.linspace(0, time, 4).astype(int)
    for start, stop in itertools.pairwise(cuts):
        second[0, start:stop], second[1, start:stop] = np.arange(stop - start), stop
    positions, until = np.stack([first, second], 1)
    return positions, until


def inputs(time: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Queries, keys and values, large enough to make sharp softmaxes; and a cotangent."""
    draw = np.random.default_rng(seed)
    shapes = [(ROWS, KV_HEADS, GROUPS, time, SIZE), *[(ROWS, KV_HEADS, time, SIZE)] * 2]
    arrays = [2 * draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    return arrays, draw.standard_normal((ROWS, time, KV_HEADS * GROUPS * SIZE)).astype(np.float32)


def expected(
    arrays: list[np.ndarray],
    cotangent: np.ndarray,
    positions: np.ndarray,
    until: np.ndarray,
    window: int | None,
    softcap: float | None,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The mixed values and the gradients of all three, and of the sinks if there are any, written out."""
    q, k, v = (x.astype(np.float64) for x in arrays)
    time = q.shape[3]
    index = np.arange(time)
    seen = (index <= index[:, None]) & (index[:, None] < until[:, None, :])
    if window is not None:
        seen &= positions[:, :, None] - positions[:, None, :] < window
    raw = np.einsum("bkgth,bksh->bkgts", q, k)
    logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - top) * seen[:, None, None]
    sink = 1e-300 if sinks is None else np.exp(sinks.astype(np.float64)[..., None, None] - top)
    total = weights.sum(-1, keepdims=True) + sink
    p = weights / total
    mixed = np.einsum("bkgts,bksh->bkgth", p, v)
    d = cotangent.astype(np.float64).reshape(ROWS, time, KV_HEADS, GROUPS, SIZE).transpose(0, 2, 3, 1, 4)
    d_p = np.einsum("bkgth,bksh->bkgts", d, v)
    d_logits = p * (d_p - (p * d_p).sum(-1, keepdims=True))
    if softcap is not None:
        d_logits *= 1 - np.tanh(raw / softcap) ** 2
    gradients = (
        np.einsum("bkgts,bksh->bkgth", d_logits, k),
        np.einsum("bkgts,bkgth->bksh", d_logits, q),
        np.einsum("bkgts,bkgth->bksh", p, d),
    )
    if sinks is not None:
        d_sinks = -(sink / total * (p * d_p).sum(-1, keepdims=True)).sum((0, 3, 4))
        gradients = (*gradients, d_sinks)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(ROWS, time, -1), gradients


PLAIN, NEAR, BOTH = (96, None, None), (200, 17, None), (150, 30, 2.0)


@pytest.mark.parametrize(
    ("way", "case"),
    [
        *(("xla", PLAIN), ("xla", BOTH)),
        *(("blocks", PLAIN), ("blocks", BOTH)),
        ("blocks of 32", BOTH),
        *(("cudnn", PLAIN), ("cudnn", NEAR)),
    ],
)
def test_value_and_gradient(way: str, case: tuple[int, int | None, float | None]) -> None:
    """With sinks where there is a soft cap."""
    time, window, softcap = case
    positions, until = trees(time)
    arrays, cotangent = inputs(time)
    cotangent[until == 0] = 0  # what an unused slot holds is nobody's business
    sinks = None
    if softcap is not None:
        sinks = np.random.default_rng(1).normal(size=(KV_HEADS, GROUPS)).astype(np.float32)
    value, gradients = expected(arrays, cotangent, positions, until, window, softcap, sinks)

    @jax.jit
    def run(*given: Any) -> Any:
        wide = None if window is None else jnp.int32(window)
        call = functools.partial(WAYS[way], window=wide, softcap=softcap)

        def over(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
            more = {"sinks": sinks[0]} if sinks else {}
            return call(q, k, v, jnp.asarray(positions), jnp.asarray(until), **more)

        mixed, back = jax.vjp(over, *given)
        return mixed, back(jnp.asarray(cotangent))

    found, found_gradients = run(*arrays, *([] if sinks is None else [sinks]))
    assert np.isfinite(found).all()
    assert not way.startswith("blocks") or not np.asarray(found)[until == 0].any()
    np.testing.assert_allclose(found[until > 0], value[until > 0], rtol=1e-4, atol=2e-5)
    for one, other in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-4)


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

    assert chosen("pallas").definition.attention == stage.registry.get(ATTENTION, "pallas")
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
    definition = defined(table, "lm").computing(remat="full")
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


@pytest.mark.parametrize("disabled", ["", "rlhf-kernels"])
def test_auto_takes_blocks_where_no_kernels_are_installed(
    disabled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugins.DISABLE, disabled)
    model = fresh_model(FAMILIES["llama"], seed=3)
    registry = plugins.load().registry
    stage: Any = SimpleNamespace(name="policy", registry=registry, devices=lambda: planned_mesh(8))
    config: Any = SimpleNamespace(attention=Component(name="auto"))
    texts = [tree([np.arange(1024, dtype=np.int32)])]
    with planned_for("gpu", 8, 10**6):
        chosen = choose_attention(model, config, stage, texts, Layout((1024,), (8,), (8,), (0,)))
    over = chosen.definition.attention
    assert over == (in_blocks(64) if disabled else registry.get(ATTENTION, "pallas"))


@pytest.mark.parametrize(
    ("name", "devices", "skips"), [("pallas", 8, True), ("blocks", 8, False), ("blocks", 1, True)]
)
def test_long_rows_suit_what_skips_blocks(name: str, devices: int, skips: bool) -> None:
    config: Any = SimpleNamespace(attention=Component(name=name))
    mesh: Any = planned_mesh(devices)
    assert attention_skips_blocks(config, mesh) is skips
