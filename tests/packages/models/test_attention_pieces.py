"""Attention over rows that devices share, and the blocks of keys that a block of queries visits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_core.mesh import cut_rows, join_zigzag, make_mesh, of_cut_rows, row_sharding, zigzag
from rlhf_core.models import Blocks, attend_blocks, visible_blocks
from rlhf_core.models.attention_pieces import attend_pieces, sees_before
from tests.shared.attention_rows import ROWS, Shape, batch, differ, layout, program


def test_devices_that_share_a_row_get_the_parts_of_it_that_they_see() -> None:
    """All of a row's parts, or ends of those before their own; either way what whole rows give, and their gradients."""
    shape, mesh, draw = (
        Shape(128, 16, window=True, sinks=True),
        make_mesh(2, context=4),
        np.random.default_rng(5),
    )
    order, index = zigzag(128, 4), np.arange(128)

    @jax.jit
    def run(q: Any, k: Any, v: Any, sinks: Any, cotangent: Any, *rows: Any) -> Any:
        def mix(*arrays: Any) -> Any:
            cut = [
                jnp.moveaxis(cut_rows(jnp.moveaxis(x, -2, 1)[:, order], mesh.abstract_mesh), 1, -2)
                for x in arrays[:3]
            ]
            with of_cut_rows():
                over, more = functools.partial(attend_blocks, block=16), {"softcap": None, "sinks": arrays[3]}
                mixed = attend_pieces(over, mesh.abstract_mesh, tuple(cut), rows[:2], rows[2], **more)
            return join_zigzag(mixed, mesh.abstract_mesh)

        mixed, back = jax.vjp(mix, q, k, v, sinks)
        return mixed, *back(cotangent)

    whole = index, np.full(128, 128)
    packed = index % 11, np.minimum(index // 11 * 11 + 11, 128)  # no sequence touches three parts of 16
    last = index % 37, np.minimum(index // 37 * 37 + 37, 128)
    # Parts of 16 tokens: neighbours send 1, 4 or 16; else all are gathered.
    rows = [(whole, 128, 112), (packed, 128, 10), (last, 128, 32)]
    rows += [(whole, before + 1, before) for before in (1, 2, 4, 5, 16, 17)]
    rows += [(layout(128, draw), int(draw.integers(1, 30)), None) for _ in range(3)]
    for (positions, until), window, before in rows:
        of_rows = [np.stack([x, y]).astype(np.int32) for x, y in zip((positions, until), packed, strict=True)]
        if before is not None:
            assert sees_before(*map(jnp.asarray, of_rows), jnp.int32(window), 8) == before
        arrays = batch(shape, draw)[:4]
        cotangent = draw.standard_normal((ROWS, 128, 32)) * (of_rows[1] > 0)[..., None]
        given = (*arrays, jnp.asarray(cotangent, jnp.float32), *of_rows, np.int32(window))
        everywhere = NamedSharding(mesh, PartitionSpec())
        placed = [
            jax.device_put(x, row_sharding(mesh) if i not in (3, 7) else everywhere)
            for i, x in enumerate(given)
        ]
        assert differ(run(*placed), program(shape)(*given), of_rows[1]) < 1e-5


def brute_force(positions: np.ndarray, until: np.ndarray, window: int | None, blocks: Blocks) -> np.ndarray:
    """Which blocks hold a pair that is seen: bool [B, query blocks, key blocks]."""
    index = np.arange(until.shape[1])
    seen = (index <= index[:, None]) & (index[:, None] < until[:, None])
    if window is not None:
        seen &= positions[:, :, None] - positions[:, None] < window
    cut = seen.reshape(len(until), -1, blocks.queries, len(index) // blocks.keys, blocks.keys)
    return cut.any((2, 4))


@pytest.mark.parametrize(
    "blocks", [Blocks(8, 8), pytest.param(Blocks(16, 8), marks=pytest.mark.long), Blocks(8, 32)]
)
def test_visits_are_what_is_seen(blocks: Blocks) -> None:
    """No pair is missed; without a window, and in square blocks, no block is visited in vain."""
    draw = np.random.default_rng(3)
    for _ in range(200):
        positions, until = (np.stack(x) for x in zip(*(layout(96, draw) for _ in range(3)), strict=True))
        window = int(draw.integers(1, 97)) if draw.random() < 0.5 else None
        seen = brute_force(positions, until, window, blocks)
        visible = visible_blocks(positions, until, window, blocks)
        assert not (seen & ~visible).any()
        if window is None and blocks.queries == blocks.keys:
            assert (seen == visible).all()
