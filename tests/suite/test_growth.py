"""benchmarks/growth: counting in compiled programs, against products and collectives counted by hand."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_core.mesh import abstract_rows, make_mesh
from rlhf_core.plugins.component import load_file
from rlhf_core.topologies import hlo
from rlhf_core.training.memory import definition_of

REPOSITORY = Path(__file__).resolve().parents[2]
GROWTH = REPOSITORY / "benchmarks" / "growth"
PAGE = REPOSITORY / "docs/results/benchmarks.md"

TEXT = """
HloModule made, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,4], bf16[16])) -> (s32[], f32[8,4], bf16[16]) {
  %state = (s32[], f32[8,4]{1,0}, /*index=2*/bf16[16]{0}) parameter(0)
  %number = s32[] get-tuple-element(%state), index=0
  %part = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %half = bf16[16]{0} get-tuple-element(%state), index=2
  %all = f32[64,4]{1,0} all-gather(%part), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %few = f32[8,4]{1,0} reduce-scatter(%all), channel_id=2, dimensions={0}, to_apply=%add
  %started = (bf16[16]{0}, bf16[128]{0}) all-gather-start(%half), channel_id=3, dimensions={0}
  %ended = bf16[128]{0} all-gather-done(%started)
  ROOT %next = (s32[], f32[8,4]{1,0}, bf16[16]{0}) tuple(%number, %few, %half)
}

%condition (state.1: (s32[], f32[8,4], bf16[16])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}, bf16[16]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (x: f32[8,4], y: bf16[16]) -> f32[] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = bf16[16]{0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}, bf16[16]{0}) tuple(%zero, %x, %y)
  %loop = (s32[], f32[8,4]{1,0}, bf16[16]{0}) while(%start), condition=%condition, body=%body, KNOWN
  %last = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %product = f32[8,8]{1,0} dot(%last, %last), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %flat = f32[] reduce(%product, %zero), dimensions={0,1}, to_apply=%add
  ROOT %both = f32[] all-reduce(%flat), channel_id=4, to_apply=%add
}
"""
KNOWN = 'backend_config={"known_trip_count":{"n":"3"}}'


def test_collectives_of_a_text() -> None:
    """Three rounds of a gather of 64 × 4 float32, a scatter that takes as much, and a gather of 128 bfloat16."""
    found = hlo.count(TEXT.replace("KNOWN", KNOWN))
    assert found.collectives == {
        "all-gather": [6, 3 * (1024 + 256)],
        "reduce-scatter": [3, 3 * 1024],
        "all-reduce": [1, 4],
    }
    assert found.flops == 2 * 8 * 8 * 4
    unknown = hlo.count(TEXT, 5)
    assert unknown.collectives["reduce-scatter"] == [5, 5 * 1024]


def compiled(function: Any, *arguments: Any, **options: Any) -> Any:
    return jax.jit(function, **options).lower(*arguments).compile()


def test_products_within_loops() -> None:
    """XLA counts the body of a loop once; products of 16 × 32 · 32 × 32 matrices in seven rounds."""
    x, w = jax.ShapeDtypeStruct((16, 32), np.float32), jax.ShapeDtypeStruct((7, 32, 32), np.float32)
    program = compiled(lambda x, w: lax.scan(lambda a, b: (jnp.tanh(a @ b), None), x, w)[0], x, w)
    assert hlo.count(program.as_text()).flops == 7 * 2 * 16 * 32 * 32
    assert program.cost_analysis()["flops"] < 2 * 2 * 16 * 32 * 32

    def rounds(x: Any, w: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.tanh(c[0] @ w[0]), c[1] + 1), (x, 0))[0]

    program = compiled(rounds, x, w, jax.ShapeDtypeStruct((), np.int32))
    assert hlo.count(program.as_text(), 4.5).flops == 4.5 * 2 * 16 * 32 * 32


def test_bytes_are_those_of_xla_where_there_is_no_loop() -> None:
    x, w = jax.ShapeDtypeStruct((64, 128), np.float32), jax.ShapeDtypeStruct((128, 256), np.float32)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.nn.silu(x @ w)[:8] ** 2)

    program = compiled(jax.grad(loss), w, x)
    assert hlo.count(program.as_text()).bytes == pytest.approx(
        program.cost_analysis()["bytes accessed"], rel=0.05
    )


def test_collectives_of_a_mesh() -> None:
    """A product whose contracted axis is spread over eight devices is summed; a spread result is gathered."""
    mesh = make_mesh(8)
    x, w = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for shape, axes in (((16, 64), (None, "data")), ((64, 32), ("data", None)))
    )
    whole = NamedSharding(mesh, PartitionSpec())
    found = hlo.count(compiled(jnp.matmul, x, w, out_shardings=whole).as_text())
    assert found.collectives == {"all-reduce": [1, 16 * 32 * 4]}
    assert found.flops == 2 * 16 * 32 * 64 / 8
    gathered = hlo.count(compiled(lambda x: x, x, out_shardings=whole).as_text())
    assert gathered.collectives == {"all-gather": [1, 16 * 64 * 4]}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GROWTH))
    made = load_file(GROWTH / "tables.py")
    for name in ("machine", "table", "works"):  # others have modules of these names
        sys.modules.pop(name, None)
    return made


def test_the_tables_are_those_of_the_results(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "benchmarks.md"
    shutil.copy(PAGE, page)
    monkeypatch.setattr(tables, "FILE", page)
    tables.main()
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), (
        "run python benchmarks/growth/tables.py"
    )
    for axis in tables.read():
        assert f"<!-- end of growth with {axis} -->" in page.read_text(encoding="utf-8")


def test_products_by_hand(tables: Any) -> None:
    """A reward step without a head costs 6 · N · tokens for the layers that compute every token, and attention.

    The last of four layers computes keys and values alone, but for the places that scores are read at.
    """
    (row,) = (r for r in tables.read()["model"] if (r["work"], r["model"]) == ("W1", "10m"))
    layer, keys = row["matrix_parameters"] / 4, 2 * 256 * 128
    places = 8 * 32
    products = 6 * (3 * layer + keys) * row["tokens"] + 6 * (layer - keys) * places
    assert 1.0 < row["flops"] / products < 1.25
    assert tables.plain_flops(row) == 6 * row["matrix_parameters"] * row["tokens"]


def test_fsdp_sends_parameters_and_not_activations() -> None:
    """Rows stay where they are: longer ones send no more, and each device keeps the activations of its own.

    The width matters: of narrow models XLA spreads the rows by itself.
    """
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    table = {"model_type": "llama", "vocab_size": 512, **sizes}
    found = definition_of(table, "lm", None)
    assert found is not None
    definition = found[0]

    def loss(params: Any, *rows: Any) -> Any:
        return jnp.sum(definition.hidden(params, *rows) ** 2)

    def program(mesh: Any, time: int) -> Any:
        shardings = definition.shardings(mesh)
        params = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            definition.abstract_params(),
            shardings,
        )
        rows = abstract_rows(mesh, (np.zeros((8, time), np.int32),) * 3)
        return compiled(jax.grad(loss), params, *rows, out_shardings=shardings)

    def sent(program: Any) -> float:
        return sum(size for _, size in hlo.count(program.as_text()).collectives.values())

    short, long = (program(make_mesh(1, 8), time) for time in (128, 256))
    stream = 8 * 128 * 256 * 4  # by how much the residual stream of all rows differs, bytes
    assert sent(long) - sent(short) < 3 * stream  # once at the embedding, forward and backward
    alone = program(make_mesh(8), 256)
    activations = [p.memory_analysis().temp_size_in_bytes for p in (long, alone)]
    assert activations[0] < 1.5 * activations[1]
