"""Lower the train step and the sampler for GPUs and TPUs, on a machine without any; sums and scores are float32 there.

It shows that no operation lacks a lowering there, and in what precision they compute. What the accelerators' compilers
and memories make of it, it does not show.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import PolicyInputs
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.metrics import Mean
from rlhf_core.models import DECODER, Definition, Lora
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.optimizers import adamw
from rlhf_core.packing import pack, tree
from rlhf_core.sampling import SamplingOptions
from rlhf_core.sampling.loop import SamplingProgram, generate
from rlhf_core.state import create_state
from rlhf_core.step import Programs
from tests.shared import mesh_cases as cases
from tests.shared.drawn import of_shapes

PLATFORMS = ("cuda", "rocm", "tpu")
ADAPTED = ("self_attn.q_proj", "mlp.down_proj")
MESHES = {"one device": (1, 1, 1), "eight devices": (2, 2, 2)}


def definition(name: str) -> Definition:
    """Define a model in an accelerator's dtype."""
    made = DECODER.define(cases.FAMILIES[name], "lm").computing(dtype="bfloat16")
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
