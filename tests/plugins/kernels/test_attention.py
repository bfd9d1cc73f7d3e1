"""Both kernels of attention, interpreted on the CPU, compute what `attend` does."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rlhf_kernels import Kernels, attend_pallas

from rlhf_core.mesh import make_mesh, over_parts, row_sharding
from rlhf_core.models import Blocks, attend
from tests.shared.attention_rows import ROWS, Shape, batch, differ, layout, program

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


@functools.cache
def interpreted(shape: Shape, platform: str) -> Any:
    """Return the kernels of a platform, interpreted."""
    return functools.partial(attend_pallas, kernels=Kernels(platform, shape.blocks, interpret=True))


def check(shape: Shape, platform: str, draw: np.random.Generator) -> None:
    given = batch(shape, draw)
    found, expected = program(shape, interpreted(shape, platform))(*given), program(shape)(*given)
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
    expected = program(PIECES)(*given)
    assert differ(found, expected, np.asarray(until)) < 1e-5


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
    truth = program(shape)(*wide, *given[5:])
    ways = program(shape, interpreted(shape, platform)), program(shape)
    kernel, dense = (differ(way(*given), truth, given[6]) for way in ways)
    print(f"{platform}: bfloat16 error {kernel:.2e}, of dense attention {dense:.2e}")
    assert kernel < 1.5 * dense


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
    assert differ(program(shape, interpreted(shape, "gpu"))(*placed), program(shape)(*given), given[6]) < 1e-5


COMPILED = """
import os, sys
sys.path += os.environ["PACKAGES"].split(os.pathsep)  # after this environment's own, whose compiler comes first
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rlhf_core.mesh import make_mesh
from rlhf_kernels import Kernels, attend_pallas
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
