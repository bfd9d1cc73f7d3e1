"""What programs are on accelerators, on a machine without any: their precisions there, and what devices exchange.

Lowered for GPUs and TPUs, no operation lacks a lowering. What the accelerators' compilers and memories make of it, that
does not show.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_topologies.hlo import count_apart

from rlhf_core import PolicyInputs, create_state
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import Mean
from rlhf_core.models import Definition, Lora
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import adamw
from rlhf_core.packing import Layout, empty_batches, pack, tree
from rlhf_core.sampling import SamplingOptions
from rlhf_core.sampling.loop import SamplingProgram, generate
from rlhf_core.step import Programs
from rlhf_core.training import definition_of
from tests.shared import mesh_cases as cases
from tests.shared.decoder_configs import defined
from tests.shared.drawn import of_shapes
from tests.shared.sent import sent

PLATFORMS = ("cuda", "rocm", "tpu")
ADAPTED = ("self_attn.q_proj", "mlp.down_proj")
MESHES = {"one device": (1, 1, 1), "eight devices": (2, 2, 2)}


def definition(name: str) -> Definition:
    """Define a model in an accelerator's dtype."""
    made = defined(cases.FAMILIES[name], "lm").computing(dtype="bfloat16")
    return made.with_lora(Lora(2, 4.0, 0.1, False, ADAPTED)) if "adapters" in name else made


def programs_of(traced: Any, platforms: tuple[str, ...] = PLATFORMS) -> list[str]:
    """Lower to StableHLO for each platform, before any compiler has changed it."""
    return [str(traced.lower(lowering_platforms=(platform,)).as_text()) for platform in platforms]


def assert_precisions(program: str) -> None:
    """Check that products take bfloat16 operands, and that logarithms, norms and softmax exponentials are float32.

    Products that ask for the highest precision, such as those of routers, are float32 by intent.
    """
    lines = re.findall(r"stablehlo\.dot_general (.*): \((tensor<\S+>), tensor<\S+>\)", program)
    products = [left for options, left in lines if "precision = [HIGHEST" not in options]
    assert all("f32" in left for options, left in lines if "precision = [HIGHEST" in options)
    assert len(products) > 10
    assert sum("bf16" in left for left in products) > 0.8 * len(products)
    assert re.search(r"stablehlo\.exponential .*xf32>", program)
    assert not re.search(r"stablehlo\.(log|log_plus_one|rsqrt|sqrt) .*bf16>", program)
    assert "callback" not in program  # no way back to the host from inside


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("mixtral", "one device"),
        pytest.param("gemma2", "one device", marks=pytest.mark.long),
        pytest.param("llama, adapters", "eight devices", marks=pytest.mark.long),
    ],
)
def test_the_train_step(name: str, devices: str) -> None:
    sizes = MESHES[devices]
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    made = definition(name)

    def objective(params: Any, batch: Any) -> tuple[Mean, dict[str, Any]]:
        logps, entropies = trained_logps(made, params, batch, entropy=True)
        weight = trained_weight(batch)
        return Mean.of(-logps, weight), {"entropy": Mean.of(entropies, weight)}

    text = np.arange(3, 15, dtype=np.int32)
    (batch,) = pack([tree([text], [np.ones(12, np.float32)])] * 8, cases.LAYOUT)
    rows, state = put_rows(mesh, batch), create_state(of_shapes(made, mesh), adamw(0.1))
    programs: Any = Programs(objective, state)
    key = state.key if made.lora is not None else None
    first = programs._trace(state, rows, key)
    done = first.out_info
    second = programs._accumulate.trace(state.params, rows, done, key)
    # What goes by the platform, attention, is in the first; the second adds to its sums.
    for program in programs_of(first) + programs_of(second, ("tpu",)):
        assert_precisions(program)
    for program in programs_of(programs._apply.trace(state.trained(), done), ("cuda", "tpu")):
        assert "bf16" not in program  # weights, gradients and moments are float32


@pytest.mark.parametrize("name", ["gemma2", pytest.param("mixtral", marks=pytest.mark.long)])
def test_the_sampler(name: str) -> None:
    """Lower the sampler with every option that adds to the program."""
    made = definition(name)
    options = SamplingOptions(
        max_completion_length=5, temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.1
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    key = jax.random.key(0)
    sampling = SamplingProgram(made, options, mesh, (2,), 2, 4, 2, str(jax.random.key_impl(key)))
    shape = jax.ShapeDtypeStruct
    traced = generate.trace(
        made.abstract_params(),
        shape((4, 8), np.int32),
        shape((4,), np.int32),
        shape((4,), np.int32),
        shape((8,), np.uint32),
        jax.random.key_data(key),
        shape((3, 36), np.uint8),
        program=sampling,
    )
    for program in programs_of(traced):
        assert "stablehlo.while" in program
        assert_precisions(program)


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


SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
TABLE: dict[str, Any] = {"model_type": "llama", "vocab_size": 512, **SIZES}


def described(mesh: Any, **table: Any) -> tuple[Programs, Any, Any]:
    """The programs of a language model whose layers are a loop, its state of shapes, and a micro-batch."""
    found = definition_of({**TABLE, **table}, "lm", None, remat="full")
    assert found is not None
    definition, _ = found

    def objective(params: Any, batch: Any) -> Any:
        logps, entropies = trained_logps(definition, params, batch, entropy=True)
        weight = trained_weight(batch)
        return Mean.of(-logps, weight), {"entropy": Mean.of(entropies, weight)}

    state = create_state(of_shapes(definition, mesh), adamw(1e-3))
    (batch,) = empty_batches(Layout((128,), (8,), (1,), (32,)))
    return Programs(objective, state), state, batch


def spread(state: Any) -> float:
    """Bytes of the parameters that are gathered: all but the embedding, whose rows are sent, and the norms."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return sum(
        4.0 * math.prod(x.shape)
        for path, x in leaves
        if "norm" not in jax.tree_util.keystr(path) and "embed_tokens" not in jax.tree_util.keystr(path)
    )


def test_fsdp_gathers_parameters_twice_and_sums_gradients_once() -> None:
    """Layers once per pass; the head is kept for the backward pass, here."""
    programs, state, batch = described(make_mesh(1, 8))
    counts = sent(programs.lower(state, batch, False).compile())
    small = 20_000  # norms, metrics
    head = 4.0 * TABLE["vocab_size"] * TABLE["hidden_size"]
    gathered = counts["all-gather"]
    assert gathered == pytest.approx(2 * (spread(state) - head) + head, abs=small)
    summed = sum(counts.get(kind, 0) for kind in ("all-reduce", "reduce-scatter"))
    assert summed == pytest.approx(spread(state), abs=small)


@pytest.mark.parametrize("shape", [(2, 4, 1), pytest.param((2, 2, 2), marks=pytest.mark.long)], ids=str)
def test_devices_along_data_exchange_gradients_once_per_update(shape: tuple[int, int, int]) -> None:
    """Of machines with an equal part of `data` each, `accumulate` sends nothing to another, `apply` one gradient."""
    mesh = make_mesh(*shape)
    programs, state, batch = described(mesh)
    machine = 8 // shape[0]
    for follows in (False, True):
        text = programs.lower(state, batch, follows).compile().as_text()
        assert count_apart(text, machine)[0].network == 0
    once, _ = count_apart(programs.lower_apply(state).compile().as_text(), machine)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4.0 for x in jax.tree.leaves(state.params))
    assert once.network == pytest.approx(2 * held * (shape[0] - 1) / shape[0], rel=0.01)


def test_what_cannot_be_cut_into_parts_is_summed_over_data_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mixture of experts: `lax.ragged_dot` has no such rule."""
    caplog.set_level(logging.INFO, logger="rlhf_core")
    programs, state, batch = described(
        make_mesh(2, 4), model_type="mixtral", num_local_experts=2, num_experts_per_tok=1
    )
    text = programs.lower(state, batch, False).compile().as_text()
    assert count_apart(text, 4)[0].network > 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("gradients are summed over data in every micro-batch (raised NotImplementedError")


def test_devices_gather_their_own_experts_alone() -> None:
    """Of eight experts two, once per pass, from the other device along `fsdp`; tokens are sent instead."""
    programs, state, batch = described(
        make_mesh(1, 2, 1, 4), model_type="mixtral", num_local_experts=8, num_experts_per_tok=2
    )
    counts = sent(programs.lower(state, batch, False).compile())
    layers = state.params["layers"]["mlp"]["experts"]
    experts = sum(4.0 * math.prod(x.shape) for x in jax.tree.leaves(layers))
    head = 4.0 * TABLE["vocab_size"] * TABLE["hidden_size"]
    dense = spread(state) - experts - head
    assert counts["all-gather"] == pytest.approx(2 * (dense + experts / 4) + head, rel=0.02)
    # Forward and again: tokens, outputs; backward: tokens with their gradients, gradients. In float32, for two experts
    # a token, with twice as much room as an even share.
    pairs = 2 * 2 * 128 * 4 * TABLE["hidden_size"] * 3
    assert counts["all-to-all"] == pytest.approx(7 * pairs, rel=0.15)
