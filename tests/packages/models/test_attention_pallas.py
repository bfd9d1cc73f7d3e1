"""The plan of blocks covers what is seen, and both kernels, interpreted on the CPU, compute what `attend` does."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_core.mesh import (
    cut_rows,
    join_zigzag,
    make_mesh,
    of_cut_rows,
    over_parts,
    row_sharding,
    zigzag,
)
from rlhf_core.models import Blocks, attend_blocks, visible_blocks
from rlhf_core.models.attention_pallas import Kernels, attend, attend_pallas
from rlhf_core.models.attention_pieces import attend_pieces, sees_before

ROWS = 2


class Shape(NamedTuple):
    """Of a batch: time, size of a head, key heads, query heads per key head, and what one program is made for."""

    time: int
    size: int
    kv_heads: int = 1
    groups: int = 2
    window: bool = False
    softcap: float | None = None
    sinks: bool = False
    blocks: tuple[Blocks, Blocks] | None = (Blocks(16, 32), Blocks(32, 16))


USUAL = Shape(75, 80, window=True, softcap=3.0, sinks=True, blocks=(Blocks(32, 16), Blocks(16, 16)))
PLAIN = Shape(96, 64, kv_heads=2, groups=1)
MANY = [
    USUAL,
    PLAIN,
    Shape(128, 128, groups=4, softcap=20.0, sinks=True),
    Shape(130, 96, window=True),
    Shape(64, 256, groups=1),
    Shape(111, 64, kv_heads=2, groups=3, window=True, softcap=2.0, blocks=(Blocks(64, 16), Blocks(16, 64))),
    Shape(200, 112, window=True, blocks=None),
    Shape(17, 16, groups=8, softcap=5.0, blocks=None),
]


def layout(time: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw positions and visible_until of a row: trees with nested branches, one after another; some rows are empty,
    and the end of most is unused.
    """
    positions, until = np.zeros((2, time), np.int32)
    start, end = 0, int(draw.integers(0, time + 1)) if draw.random() < 0.7 else time

    def grow(start: int, end: int, position: int, depth: int) -> None:
        trunk = int(draw.integers(1, end - start + 1)) if depth < 3 else end - start
        positions[start : start + trunk] = position + np.arange(trunk)
        until[start : start + trunk] = end
        cuts = np.sort(draw.integers(start + trunk, end + 1, draw.integers(0, 4)))
        for left, right in itertools.pairwise([start + trunk, *cuts, end]):
            if right > left:
                grow(left, right, position + trunk, depth + 1)

    while start < end:
        stop = int(draw.integers(start + 1, end + 1)) if draw.random() < 0.7 else end
        grow(start, stop, 0, 0)
        start = stop
    return positions, until


def batch(shape: Shape, draw: np.random.Generator, dtype: Any = np.float32) -> tuple[Any, ...]:
    """Queries, keys, values, sinks, a cotangent, positions, visible_until, and a window."""
    time, size, heads, groups, *_ = shape
    positions, until = (np.stack(x) for x in zip(*(layout(time, draw) for _ in range(ROWS)), strict=True))
    q = draw.standard_normal((ROWS, heads, groups, time, size)) * 2 / np.sqrt(size)
    k, v = draw.standard_normal((2, ROWS, heads, time, size))
    cotangent = draw.standard_normal((ROWS, time, heads * groups * size)) / np.sqrt(size)
    cotangent[until == 0] = 0  # nothing reads what an unused slot gets
    sinks = draw.standard_normal((heads, groups))
    arrays = (jnp.asarray(x, dtype) for x in (q, k, v, sinks, cotangent))
    return *arrays, positions, until, np.int32(draw.integers(1, time + 1))


@functools.cache
def program(shape: Shape, platform: str | None) -> Any:
    """Compile the value and gradients of a kernel, interpreted; None: of `attend`."""
    kernels = None if platform is None else Kernels(platform, shape.blocks, interpret=True)
    over = attend if kernels is None else functools.partial(attend_pallas, kernels=kernels)

    @jax.jit
    def run(
        q: Any, k: Any, v: Any, sinks: Any, cotangent: Any, positions: Any, until: Any, window: Any
    ) -> Any:
        near = window if shape.window else None

        def mix(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            sinks = sinks if shape.sinks else None
            return over(q, k, v, positions, until, window=near, softcap=shape.softcap, sinks=sinks)

        mixed, back = jax.vjp(mix, q, k, v, sinks)
        return mixed, *back(cotangent)

    return run


def differ(found: Any, expected: Any, until: np.ndarray) -> float:
    """Return the largest difference of the value in used slots, and of the gradients, relative to the largest number
    where that is above 1.
    """
    used = (until > 0)[..., None]
    pairs = [(found[0] * used, expected[0] * used), *zip(found[1:], expected[1:], strict=True)]
    wide = [(np.asarray(one, np.float64), np.asarray(other, np.float64)) for one, other in pairs]
    return max(np.abs(one - other).max() / max(1.0, np.abs(other).max()) for one, other in wide)


def check(shape: Shape, platform: str, draw: np.random.Generator) -> None:
    given = batch(shape, draw)
    found, expected = program(shape, platform)(*given), program(shape, None)(*given)
    until = given[6]
    assert differ(found, expected, until) < 1e-5
    mixed, d_q, d_k, d_v, _ = map(np.asarray, found)
    unused = until == 0
    assert not mixed[unused].any()
    for gradient in (np.moveaxis(d_q, 3, 1), np.moveaxis(d_k, 2, 1), np.moveaxis(d_v, 2, 1)):
        assert not gradient[unused].any()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_kernels_compute_attention(platform: str) -> None:
    draw = np.random.default_rng(0)
    for _ in range(6):
        check(USUAL, platform, draw)


PIECES = Shape(128, 32, window=True, softcap=3.0, sinks=True)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_devices_that_share_a_row_compute_their_own_queries(platform: str) -> None:
    """Each two runs of 32 queries; gradients of keys, values and sinks are summed over them."""
    given = tuple(map(jnp.asarray, batch(PIECES, np.random.default_rng(2))))
    *arrays, cotangent, positions, until, window = given
    kernels = Kernels(platform, PIECES.blocks, interpret=True)
    over = functools.partial(attend_pallas, kernels=kernels)

    @jax.jit
    def run(starts: Any) -> Any:
        at = (starts[:, None] + jnp.arange(32)).reshape(-1)
        more = {"window": window, "softcap": 3.0, "starts": starts}

        def mix(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return over(q[:, :, :, at], k, v, positions, until, sinks=sinks, **more)

        mixed, back = jax.vjp(mix, *arrays)
        return jnp.zeros(cotangent.shape).at[:, at].set(mixed), *back(cotangent[:, at])

    parts = [run(jnp.int32([32 * i, 32 * (3 - i)])) for i in range(2)]
    found = [sum(each) for each in zip(*parts, strict=True)]
    expected = program(PIECES, None)(*given)
    assert differ(found, expected, np.asarray(until)) < 1e-5


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
        assert differ(run(*placed), program(shape, None)(*given), of_rows[1]) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_kernels_compute_attention_of_many_layouts(shape: Shape, platform: str) -> None:
    """Over all shapes 504 rows per kernel, two per batch."""
    draw = np.random.default_rng(1)
    for _ in range(-(-500 // (ROWS * len(MANY)))):
        check(shape, platform, draw)


@pytest.mark.exhaustive
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_bfloat16_errs_like_dense_attention(platform: str) -> None:
    shape = USUAL
    given = batch(shape, np.random.default_rng(2), jnp.bfloat16)
    wide = tuple(jnp.asarray(x, jnp.float32) for x in given[:5])
    truth = program(shape, None)(*wide, *given[5:])
    kernel, dense = (differ(program(shape, way)(*given), truth, given[6]) for way in (platform, None))
    print(f"{platform}: bfloat16 error {kernel:.2e}, of dense attention {dense:.2e}")
    assert kernel < 1.5 * dense


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


@pytest.mark.parametrize(
    ("parts", "platform"), [pytest.param(False, "gpu", marks=pytest.mark.long), (True, "tpu")]
)
def test_each_device_computes_its_rows_and_heads(parts: bool, platform: str) -> None:
    """On a mesh of all three axes, and within `over_parts`; nothing is gathered."""
    mesh, draw = make_mesh(2, 2, 2), np.random.default_rng(4)
    layouts = [layout(32, draw) for _ in range(4)]
    positions, until = (np.stack(x) for x in zip(*layouts, strict=True))
    q, k, v = (draw.standard_normal((4, 2, *group, 32, 16)).astype(np.float32) for group in ((2,), (), ()))
    rows = {"q": q, "k": k, "v": v, "positions": positions, "visible_until": until}
    sinks = jnp.asarray(draw.standard_normal((2, 2)), jnp.float32)
    kernels = Kernels(platform, (Blocks(16, 16),) * 2, interpret=True)

    def loss(q: Any, sinks: Any, rows: Any, over: Any) -> Any:
        return (over(**rows | {"q": q}, sinks=sinks) * (rows["visible_until"] > 0)[..., None]).var(
            axis=(1, 2)
        )

    def value(rows: Any, over: Any) -> Any:
        d_q, d_sinks = jax.grad(lambda *x: loss(*x, rows, over).sum(), (0, 1))(rows["q"], sinks)
        return loss(rows["q"], sinks, rows, over), d_q, d_sinks[None]  # of each part

    over = functools.partial(attend_pallas, kernels=kernels)
    kernel = functools.partial(value, over=over)
    if parts:
        mapped = over_parts(lambda rows, _: kernel(rows), mesh)
        whole = lambda rows: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped(rows, jnp.zeros(2)))  # noqa: E731
    else:
        whole = kernel
    sharded = jax.device_put(rows, row_sharding(mesh))
    if not parts:  # which puts rows on devices itself
        heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
        sharded |= {name: jax.device_put(rows[name], heads) for name in ("q", "k", "v")}
    compiled = jax.jit(whole).lower(sharded).compile()
    assert not re.search("all-(gather|to-all)", compiled.as_text())
    expected = jax.jit(functools.partial(value, over=attend))(rows)
    for one, other in zip(compiled(sharded), expected, strict=True):
        one, other = (x.sum(0) if x.ndim == 3 else x for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [PLAIN.size, 320])
def test_what_kernels_do_not_hold_is_computed_all_the_same(size: int) -> None:
    """Rows that a mesh does not divide; wide heads too, as in the global layers of Gemma 4."""
    shape = PLAIN._replace(size=size)
    given = batch(shape, np.random.default_rng(5))
    placed = given
    if shape == PLAIN:
        placed = jax.device_put(given, NamedSharding(make_mesh(4, 2, 1), PartitionSpec()))
    assert differ(program(shape, "gpu")(*placed), program(shape, None)(*given), given[6]) < 1e-5


COMPILED = """
import os, sys
sys.path += os.environ["PACKAGES"].split(os.pathsep)  # after this environment's own, whose compiler comes first
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rlhf_core.mesh import make_mesh
from rlhf_core.models.attention_pallas import Kernels, attend_pallas
from rlhf_topologies.compile import find_devices
from rlhf_topologies.hlo import count
from rlhf_topologies.chips import parse

TIME = 3072
for on in sys.argv[1:]:
    topology = parse(on)
    mesh = make_mesh(1, -1, 1, devices=find_devices(topology))
    rows = mesh.size
    shapes = (80, 4, "bfloat16", None), (256, 2, "bfloat16", 512), (128, 1, "float32", None)
    sinks = jax.ShapeDtypeStruct((2, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    for size, groups, dtype, window in shapes:
        def shaped(shape, dtype=dtype):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

        def loss(q, k, v, sinks, positions, until):
            sinks = sinks if groups == 4 else None
            cap, near = (None, None) if window is None else (30.0, jnp.int32(window))
            over = attend_pallas(
                q, k, v, positions, until, window=near, softcap=cap, sinks=sinks,
                kernels=Kernels(topology.chip.platform),
            )
            return over.astype(jnp.float32).sum()

        q, k = shaped((rows, 2, groups, TIME, size)), shaped((rows, 2, TIME, size))
        tokens = shaped((rows, TIME), "int32")
        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(q, k, k, sinks, tokens, tokens).compile()
        text = compiled.as_text()
        assert f"{TIME},{TIME}" not in text, (on, size)
        pairs = 2 * groups * TIME * (TIME + 1) // 2
        counted = sum(count(text).products.values())
        # Forward two products of pairs, backward seven; heads may be counted padded.
        assert 1 <= counted / (9 * 2 * size * pairs) < 2.1, (on, size, counted)
        print("compiled", on, size, dtype)
"""


@pytest.mark.accelerators
@pytest.mark.parametrize(
    ("platform", "on"),
    [("gpu", ["h100:8", "h200:1"]), ("tpu", ["v5e:2x2", "v5p:2x2x2", "v6e:2x4"])],
    ids=["gpu", "tpu"],
)
def test_kernels_compile_without_an_array_of_time_by_time(platform: str, on: list[str]) -> None:
    from rlhf_topologies import interpreters

    python = os.environ.get(interpreters.variable(platform))
    if not python:
        pytest.skip(
            "set RLHF_GPU_PYTHON and RLHF_TPU_PYTHON, or run make test-accelerators, which installs them"
        )
    environment = os.environ | interpreters.SETTINGS | {"PACKAGES": os.pathsep.join(filter(None, sys.path))}
    environment.pop("PYTHONPATH", None)
    ended = subprocess.run([python, "-c", COMPILED, *on], env=environment, text=True, capture_output=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("compiled") == 3 * len(on)
