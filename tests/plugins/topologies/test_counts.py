"""Counting in compiled programs, against products, bytes and collectives counted by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from rlhf_topologies import hlo

from rlhf_core.mesh import abstract_rows, make_mesh
from rlhf_core.training import definition_of

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


def test_a_loop_without_a_known_number_of_rounds_is_counted_by_itself() -> None:
    x, w = jax.ShapeDtypeStruct((16, 32), np.float32), jax.ShapeDtypeStruct((32, 32), np.float32)

    def decode(x: Any, w: Any, n: Any) -> Any:
        def round_of(carry: Any) -> Any:
            x, i = carry
            inner = lax.while_loop(lambda c: c[1] < i, lambda c: (jnp.sin(c[0] @ w), c[1] + 1), (x, 0))[0]
            for _ in range(3):
                inner = jnp.tanh(inner @ w)
            return inner, i + 1

        return lax.while_loop(lambda c: c[1] < n, round_of, (jnp.tanh(x @ w), 0))[0]

    text = compiled(decode, x, w, jax.ShapeDtypeStruct((), np.int32)).as_text()
    once, loops = hlo.count_apart(text)
    assert once.flops == 2 * 16 * 32 * 32
    assert [loop.flops for loop in loops] == [3 * 2 * 16 * 32 * 32]  # the loop within it is left out
    assert hlo.count(text, 2).flops == 2 * 16 * 32 * 32 * (1 + 2 * (3 + 2))


def lines(*body: str, partitions: int = 1) -> str:
    inside = "\n".join(f"  {line}" for line in body)
    return (
        f"HloModule made, num_partitions={partitions}\n\nENTRY %main (x: f32[1]) -> f32[1] {{\n{inside}\n}}\n"
    )


@pytest.mark.parametrize(
    ("window", "shapes", "flops"),
    [
        # A product of 64 × 128 by 128 × 256, as TPUs write it.
        ("dim_labels=bf_io->bf", ("64,128", "128,256", "64,256"), 2 * 64 * 128 * 256),
        # Four products of 8 × 16 by 16 × 32: the batch is a dimension that the window slides over.
        (
            "window={size=4 stride=3 pad=0_0 lhs_dilate=4} dim_labels=0bf_0io->0bf",
            ("4,8,16", "4,16,32", "4,8,32"),
            4 * 2 * 8 * 16 * 32,
        ),
        # A convolution of its own, five places by windows of three: padding counts.
        ("window={size=3 pad=1_1} dim_labels=b0f_0io->b0f", ("1,5,2", "3,2,7", "1,5,7"), 15 * 2 * 2 * 7),
    ],
)
def test_products_that_tpus_write_as_convolutions(window: str, shapes: tuple[str, ...], flops: float) -> None:
    left, right, out = (f"bf16[{sizes}]" for sizes in shapes)
    text = lines(
        f"%left = {left} parameter(0)",
        f"%right = {right} parameter(1)",
        f"ROOT %out = {out} convolution(%left, %right), {window.replace('} ', '}, ')}",
    )
    assert dict(hlo.count(text).products) == {"bf16": flops}


def test_attention_of_cudnn_counts() -> None:
    """Two products of 8 heads: [512, 64] by [64, 512] and [512, 512] by [512, 64]; backward takes five."""
    body = [f"%{name} = bf16[2,512,8,64]{{3,2,1,0}} parameter({i})" for i, name in enumerate("qkv")]
    for target, products in (("__cudnn$fmhaScaleBiasSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)):
        call = f'ROOT %o = bf16[2,512,8,64] custom-call(%q, %k, %v), custom_call_target="{target}"'
        assert hlo.count(lines(*body, call)).flops == products * 2 * 2 * 8 * 512 * 512 * 64


@pytest.mark.parametrize(
    "stated",
    [
        'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"x","cost_estimate":'
        '{"flops":"600","transcendentals":"0","bytes_accessed":"700","remote_bytes_transferred":"0"}}}',
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = "\\00", serialized_metadata = '
        '"{\\22flops\\22: \\22600\\22, \\22bytes_accessed\\22: \\22700\\22}"}',
    ],
    ids=["tpu", "gpu"],
)
def test_a_kernel_counts_as_it_states(stated: str) -> None:
    """As XLA writes what Pallas passes on: of the operands it may read a part."""
    text = lines(
        "%n = s32[2] parameter(0)",
        "%x = bf16[4096] parameter(1)",
        f"ROOT %o = f32[8] custom-call(%n, %x), {stated}",
    )
    counts = hlo.count(text)
    assert (dict(counts.products), counts.bytes) == ({"bf16": 600.0}, 700.0)


def test_kernels_that_may_hide_products_are_named() -> None:
    call = 'ROOT %o = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"'
    text = lines("%x = f32[8] parameter(0)", call)
    with pytest.raises(ValueError, match="tpu_custom_call"):
        hlo.count(text)
    assert hlo.count_apart(text)[0].uncounted == ["tpu_custom_call"]


def test_arrays_beside_the_units_are_no_traffic() -> None:
    """Of 4 + 8 + 8 kB the two in a TPU's fast memory stay there."""
    text = lines(
        "%x = f32[1024]{0:T(1024)} parameter(0)",
        "%y = f32[2048]{0:T(1024)S(1)} parameter(1)",
        'ROOT %z = f32[2048]{0:T(1024)S(1)} custom-call(%x, %y), custom_call_target="Sharding"',
    )
    assert hlo.count(text).bytes == 4096


@pytest.mark.parametrize(
    ("collective", "sent", "network"),
    [
        # 16 devices in two machines; of 64 kB each device holds 4, and gets 60.
        ("%o = f32[16384] all-gather(%x), replica_groups=[1,16]<=[16]", 61440, 65536 / 2 / 8),
        ("%o = f32[16384] all-gather(%x), replica_groups=[2,8]<=[16]", 65536 * 7 / 8, 0),
        ("%o = f32[16384] all-gather(%x), replica_groups=[8,2]<=[2,8]T(1,0)", 65536 / 2, 65536 / 2),
        # The same groups as axes of a mesh, in the order of devices or in another, and as a part of an axis.
        ("%o = f32[16384] all-gather(%x), replica_groups=mesh['a'=2,'b'=8] {'b'}", 65536 * 7 / 8, 0),
        ("%o = f32[16384] all-gather(%x), replica_groups=mesh['a'=2,'b'=8] {'a'}", 65536 / 2, 65536 / 2),
        (
            "%o = f32[16384] all-gather(%x), replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'a'}",
            65536 * 7 / 8,
            0,
        ),
        ("%o = f32[16384] all-gather(%x), replica_groups=mesh['a'=16] {'a':(2)8}", 65536 * 7 / 8, 0),
        ("%o = f32[16384] all-gather(%x), replica_groups=mesh['a'=16] {'a':(1)2}", 65536 / 2, 65536 / 2),
        ("%o = f32[1024] all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}", 2 * 4096 * 3 / 4, 0),
        ("%o = f32[1024] all-reduce(%x), replica_groups={{0,8},{1,9}}", 4096, 4096),
        ("%o = f32[1024] collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 4096, 0),
        ("%o = f32[1024] collective-permute(%x), source_target_pairs={{0,8},{8,0}}", 0, 4096),
    ],
)
def test_what_is_sent_within_machines_and_between_them(collective: str, sent: float, network: float) -> None:
    text = lines("%x = f32[1024] parameter(0)", f"ROOT {collective}", partitions=16)
    counts, _ = hlo.count_apart(text, machine=8)
    assert (counts.sent, counts.network) == (sent, network)
    together, _ = hlo.count_apart(text)
    assert together.network == 0


COUNTER = """
HloModule made

%test (state: (s32[], f32[8,8], s32[])) -> pred[] {
  %state = (s32[], f32[8,8], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %end = s32[] get-tuple-element(%state), index=2
  ROOT %go = pred[] compare(%i, %end), direction=LT
}

%round (state.1: (s32[], f32[8,8], s32[])) -> (s32[], f32[8,8], s32[]) {
  %state.1 = (s32[], f32[8,8], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%state.1), index=0
  %x = f32[8,8] get-tuple-element(%state.1), index=1
  %last = s32[] get-tuple-element(%state.1), index=2
  %two = s32[] constant(2)
  %following = s32[] add(%j, %two)
  %copied = s32[] copy(%following)
  %y = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], f32[8,8], s32[]) tuple(%copied, %y, %last)
}

ENTRY %main (a: f32[8,8], n: s32[]) -> (s32[], f32[8,8], s32[]) {
  %a = f32[8,8] parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(1)
  %start = s32[] copy(%zero)
  %seven = s32[] constant(8)
  %all = (s32[], f32[8,8], s32[]) tuple(%start, %a, %END)
  ROOT %loop = (s32[], f32[8,8], s32[]) while(%all), condition=%test, body=%round
}
"""


def test_rounds_between_constants_are_known_without_xla_s_word() -> None:
    """TPUs' programs lack it: from 1 to 8 in steps of 2 are four rounds. An end that is an argument depends on data."""
    once, loops = hlo.count_apart(COUNTER.replace("%END", "%seven"))
    assert (once.flops, loops) == (4 * 2 * 8**3, [])
    once, loops = hlo.count_apart(COUNTER.replace("%END", "%n"))
    assert (once.flops, [loop.flops for loop in loops]) == (0, [2 * 8**3])


def test_a_reduce_scatter_sends_half_of_an_all_reduce() -> None:
    """As TPUs write it: each of eight devices sends 7/8 of 4 kB once, not twice."""
    text = lines(
        "%x = f32[1024] parameter(0)",
        "ROOT %o = f32[128] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1",
        partitions=8,
    )
    text += """
%all-reduce-scatter.1 (y: f32[1024]) -> f32[128] {
  %y = f32[1024] parameter(0)
  %all = f32[1024] all-reduce(%y), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %part = f32[128] slice(%all), slice={[0:128]}
}
"""
    counts, _ = hlo.count_apart(text)
    assert counts.sent == 4096 * 7 / 8
    assert dict(counts.collectives) == {"reduce-scatter": [1, 4096]}


def test_what_is_sliced_behind_a_bitcast_is_not_read_whole() -> None:
    """A bitcast moves nothing: of 64 states a loop's round reads one, and writes one."""
    text = lines(
        "%x = f32[64,256] parameter(0)",
        "%i = s32[] constant(3)",
        "ROOT %o = f32[256] fusion(%x, %i), kind=kLoop, calls=%one",
    )
    text += """
%one (y: f32[64,256], j: s32[]) -> f32[256] {
  %y = f32[64,256] parameter(0)
  %j = s32[] parameter(1)
  %turned = f32[64,256] bitcast(%y)
  %zero = s32[] constant(0)
  %part = f32[1,256] dynamic-slice(%turned, %j, %zero), dynamic_slice_sizes={1,256}
  ROOT %flat = f32[256] bitcast(%part)
}
"""
    assert hlo.count(text).bytes == 2 * 4 * 256 + 4  # and the index
