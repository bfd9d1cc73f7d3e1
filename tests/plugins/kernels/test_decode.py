"""Kernels over caches, in interpret mode, equal the definition in float64, and read only what is visible."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rlhf_kernels import attend_visible
from rlhf_topologies import hlo, interpreters

from rlhf_core.mesh import make_mesh
from rlhf_core.models import MASKED
from rlhf_core.models.attention_cached import attend_groups
from tests.shared.plans import planned_for

BLOCKS = {"gpu": 32, "tpu": 128}
"""Entries per block, of heads of 128 in float32."""
run = jax.jit(attend_visible, static_argnames=("softcap", "on", "interpret"))


def check(
    kernel: str, shape: tuple[int, int, int, int], entries: int, softcap: float | None, runs: Any
) -> None:
    """Compare a kernel with float64 over runs of entries. shape: rows, kv heads, query heads of each, head size."""
    rows, kv_heads, repeats, size = shape
    draw = np.random.default_rng(0)
    shapes = [
        (rows, kv_heads, repeats, size),
        (rows, kv_heads, size, entries),
        (rows, kv_heads, entries, size),
    ]
    queries, keys, values = (draw.standard_normal(shape) for shape in shapes)
    queries *= 3 / np.sqrt(size)
    for first, end in runs:
        hidden = np.r_[0:first, end:entries]
        held = keys.copy(), values.copy()
        held[0][..., hidden], held[1][:, :, hidden] = 50.0, 1e6  # would show in every sum
        arrays = (jnp.asarray(x, jnp.float32) for x in (queries, *held))
        found = run(*arrays, first, end, softcap, on=kernel, interpret=True)
        logits = np.einsum("bkrh,bkht->bkrt", queries, keys[..., first:end])
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        highest = logits.max(-1, initial=MASKED)
        weights = np.exp(logits - highest[..., None])
        expected = np.einsum("bkrt,bkth->bkrh", weights, values[:, :, first:end]), highest, weights.sum(-1)
        for name, x, y in zip(found._fields, found, expected, strict=True):
            assert x.dtype == jnp.float32
            message = f"{name}, entries {first} to {end}"
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5, err_msg=message)


@pytest.mark.parametrize("kernel", BLOCKS)
def test_only_visible_entries_count(kernel: str) -> None:
    """None, one, a block with one more or less, everything; and those that a window begins with."""
    block = BLOCKS[kernel]
    entries = 2 * block + 24  # which no block divides
    runs = [(0, end) for end in (0, 1, block - 1, block, block + 1, entries)]
    check(kernel, (2, 1, 4, 128), entries, None, [*runs, (block, block + 1), (block + 7, entries)])


ODD, WIDE = (1, 3, 8, 80), (1, 2, 3, 256)


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        ("gpu", ODD),  # padded to a power of two
        ("tpu", WIDE),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("gpu", (2, 1, 1, 64)), ("tpu", ODD))),
    ],
    ids=str,
)
def test_heads_of_any_size_and_soft_caps(kernel: str, shape: tuple[int, int, int, int]) -> None:
    check(kernel, shape, 200, 2.0, [(0, 130), (70, 171)])


def test_small_grids_are_split_and_large_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for programs in (1, 3, 100):
        monkeypatch.setattr("rlhf_kernels.decode.GPU_PROGRAMS", programs)
        run.clear_cache()
        check("gpu", (1, 1, 2, 128), 200, None, [(0, 1), (0, 97), (40, 200)])


def suits(size: int, entries: int, dtype: Any = jnp.bfloat16) -> bool:
    """Return whether the kernel of the platform takes a cache."""
    shapes = (8, 2, 1, size), (8, 2, size, entries), (8, 2, entries, size)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    # A function of its own, since JAX keeps what it traced for another platform.
    return jax.eval_shape(lambda *given: attend_visible(*given), *arrays, 0, 1) is not None


def test_caches_that_kernels_suit() -> None:
    """On accelerators; neither short caches nor, on TPUs, small heads."""
    assert not suits(128, 1024)
    for platform, sizes in (("gpu", {64, 80, 128, 256}), ("tpu", {128, 256})):
        with planned_for(platform, 1):
            assert {size for size in (8, 64, 80, 128, 256, 512) if suits(size, 1024)} >= sizes
            assert not suits(8, 1024)
            assert not suits(128, 64)
            assert not suits(128, 1024, jnp.int8)


@pytest.mark.parametrize(
    ("capability", "taken"), [("7.5", False), ("8.0", True), ("12.0", True), ("gfx90a", False)]
)
def test_gpus_that_triton_compiles_for(capability: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(compute_capability=capability, platform="gpu")
    monkeypatch.setattr("rlhf_kernels.decode.platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert suits(128, 1024) == taken


def test_a_sampler_reads_what_is_visible_where_caches_lie_on_one_device_each() -> None:
    """On a planned device, or in a program of each of several; else the partitioner would gather the cache."""

    def traced(mesh: Any = None) -> bool:
        shapes = [(8, 4, 1, 128), (2, 4, 128, 16), (2, 4, 16, 128), (8, 4, 128, 512), (8, 4, 512, 128)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        read = jax.ShapeDtypeStruct((2, 1, 16), bool)
        own = jax.ShapeDtypeStruct((512,), bool)

        def over(q: Any, *caches: Any) -> Any:
            prompt_keys, prompt_values, keys, values, read, own = caches
            return attend_groups(q, (prompt_keys, prompt_values, read), (keys, values, own))

        if mesh is not None:
            spec = PartitionSpec("data", "tensor")
            specs = (*(spec,) * 5, PartitionSpec("data"), PartitionSpec())
            over = jax.shard_map(over, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
        return "pallas_call" in str(jax.make_jaxpr(over)(*arrays, read, own))

    assert not traced()
    for platform in ("gpu", "tpu"):
        with planned_for(platform, 1):
            assert traced()
        with planned_for(platform, 8):
            assert not traced()
            assert traced(make_mesh(data=2, fsdp=1, tensor=4))


COMPILE = """
import sys
from rlhf_core import SamplerInputs
from rlhf_core.mesh import make_mesh
from rlhf_core.models import DECODER, Definition
from rlhf_core.runtime import machine
from rlhf_core.sampling import Sampler, SamplingMesh, SamplingOptions, placement
from rlhf_topologies.compile import find_devices
from rlhf_topologies.chips import parse
topology = parse(sys.argv[1])
found = find_devices(topology)
planning = machine.planning_for(machine.Planned(topology.chip.platform, len(found), 10**9))
planning.__enter__()
sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
definition = DECODER.define({"model_type": "llama", **sizes, **heads}, "lm").computing(dtype="bfloat16")
mesh = make_mesh(fsdp=len(found), devices=found)
options = SamplingOptions(max_completion_length=512, mesh=SamplingMesh(tensor=4))
counts = {"num_generations": 4, "prompts_per_call": 8, "max_prompt_length": 32}
sampler = Sampler(SamplerInputs(definition, options, mesh=mesh, stop_ids=(3,), **counts))
assert sampler.room.shares_prompts
lowered = sampler.lower(placement.abstract_weights(definition, sampler.mesh), 32)
open(sys.argv[2], "w").write(lowered.compile().as_text())
"""


@pytest.mark.accelerators
@pytest.mark.parametrize(("on", "platform"), [("h100:4", "gpu"), ("v5e:2x2", "tpu")])
def test_the_loop_holds_no_copy_of_a_cache(on: str, platform: str, tmp_path: Path) -> None:
    """Every layer has its kernel, which takes the cache as the loop carries it and is counted by what it reads."""
    python = os.environ.get(interpreters.variable(platform))
    if not python:
        pytest.skip(
            "set RLHF_GPU_PYTHON and RLHF_TPU_PYTHON, or run make test-accelerators, which installs them"
        )
    file = tmp_path / "hlo"
    start = f"import sys; sys.path += {interpreters.import_paths()!r}\n{COMPILE}"
    subprocess.run([python, "-c", start, on, file], env=interpreters.environment_variables(), check=True)
    text = file.read_text(errors="replace")
    reader = hlo.ProgramReader(text)
    body = max((reader.computations[name] for name in reader.outer_loops()), key=len)
    kernels = [each for each in body.values() if each.opcode == "custom-call" and hlo.stated_cost(each)]
    cache = 32 * 1 * 128 * 512 * 2
    assert len(kernels) == 2
    assert all(cache < hlo.stated_cost(each)["bytes_accessed"] < 1.3 * cache for each in kernels)
    passed = ("parameter", "get-tuple-element", "tuple", "bitcast", "dynamic-update-slice")
    for each in body.values():
        if hlo.shape_bytes(each.shape) == cache and each.opcode not in passed:
            assert each.opcode == "fusion", each
            called = reader.computations[hlo.called_by(each)[0]].values()
            assert any(one.opcode == "dynamic-update-slice" for one in called), each
            assert not any(one.opcode in ("copy", "transpose") for one in called), each
