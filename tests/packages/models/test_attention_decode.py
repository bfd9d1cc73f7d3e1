"""Attention over caches: kernels in interpret mode equal the definition in float64; continued caches, the full pass."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_topologies import hlo, interpreters

from rlhf_core.mesh import make_mesh
from rlhf_core.models import Definition
from rlhf_core.models.attention_cached import (
    CACHE_PART,
    attend_cached,
    cache_parts,
    cut,
)
from rlhf_core.models.attention_decode import MASKED, attend_visible, reads_visible
from tests.shared.decoder_configs import CONFIGS, defined
from tests.shared.drawn import params_of
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
        monkeypatch.setattr("rlhf_core.models.attention_decode.GPU_PROGRAMS", programs)
        run.clear_cache()
        check("gpu", (1, 1, 2, 128), 200, None, [(0, 1), (0, 97), (40, 200)])


def keys(size: int, entries: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct((8, 2, size, entries), dtype)


def test_caches_that_kernels_suit() -> None:
    """On accelerators, on one device or in a program of each; neither short caches nor, on TPUs, small heads."""
    assert not reads_visible(keys(128, 1024))
    for platform, sizes in (("gpu", {64, 80, 128, 256}), ("tpu", {128, 256})):
        with planned_for(platform, 1):
            assert {size for size in (8, 64, 80, 128, 256, 512) if reads_visible(keys(size, 1024))} >= sizes
            assert not reads_visible(keys(8, 1024))
            assert not reads_visible(keys(128, 64))
            assert not reads_visible(keys(128, 1024, jnp.float64))
        with planned_for(platform, 8):
            assert not reads_visible(keys(128, 1024))  # the partitioner would gather the cache
            mesh = make_mesh(data=2, fsdp=1, tensor=4)
            spec = jax.sharding.PartitionSpec("data", "tensor")
            suited: list[bool] = []

            def note(x: Any, suited: list[bool] = suited) -> Any:
                suited.append(reads_visible(x))
                return x

            each = jax.shard_map(note, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            jax.eval_shape(each, jax.ShapeDtypeStruct((8, 4, 128, 1024), jnp.bfloat16))
            assert suited == [True]


@pytest.mark.parametrize(
    ("capability", "suits"), [("7.5", False), ("8.0", True), ("12.0", True), ("gfx90a", False)]
)
def test_gpus_that_triton_compiles_for(capability: str, suits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_core.models.attention_decode.platform", lambda: "gpu")
    monkeypatch.setattr("rlhf_core.models.attention_decode.device_count", lambda: 1)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert reads_visible(keys(128, 1024)) == suits


COMPILE = """
import sys
from rlhf_core import SamplerInputs
from rlhf_core.mesh import make_mesh
from rlhf_core.models import DECODER, Definition
from rlhf_core.runtime import devices
from rlhf_core.sampling import Sampler, SamplingMesh, SamplingOptions, placement
from rlhf_topologies.compile import find_devices
from rlhf_topologies.chips import parse
topology = parse(sys.argv[1])
found = find_devices(topology)
planning = devices.planning_for(devices.Planned(topology.chip.platform, len(found), 10**9))
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
    reader = hlo.Reader(text)
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


VOCAB, LENGTH = 37, 64
WINDOW = {"sliding_window": 8, "rms_norm_eps": 0.01}  # without it, norms of short vectors enlarge rounding
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": CONFIGS["gemma3"] | {"sliding_window": 8},
    "gemma4": CONFIGS["gemma4, shared keys"] | WINDOW,
    "qwen3_5": CONFIGS["qwen3_5"],
}
"""Windows and several rotary embeddings, keys and values of other layers, states: what `extend` passes on by itself.
Conversations of other families: tests/packages/sampling/test_conversations.py."""


def used(definition: Definition, params: Any, rows: int) -> Any:
    """Make a cache that other tokens have used before."""
    one = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    read = jax.eval_shape(definition.prefill, params, one, one, one)[1]
    cache = jax.eval_shape(lambda read: definition.ring(read, LENGTH, 0), read)
    return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_single_tokens_give_the_hidden_states_of_the_whole(name: str) -> None:
    """Three rows at places of their own; padding behind a chunk is overwritten; plain parameters of one family, too."""
    definition = defined(FAMILIES[name], "lm")
    params = params_of(definition, 0, 0.3)
    extend, decode = jax.jit(definition.extend), jax.jit(definition.decode)
    # Short outputs of the delta rule are normalised, which magnifies what parameters are rounded by as much.
    bound = 2e-4 if name == "qwen3_5" else 2e-5
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    expected = np.asarray(jax.jit(definition.hidden)(params, tokens, positions, np.full_like(tokens, LENGTH)))
    plain = (params,) if name == "gemma3" else ()
    for weights in (*plain, definition.prepare(params)):
        cache, start = used(definition, params, 3), np.zeros(3, np.int32)
        for lengths in ((7, 16, 1), (16, 3, 9), (2, 11, 16)):
            chunk = rng.integers(0, VOCAB, (3, 16)).astype(np.int32)
            for row, n in enumerate(lengths):
                chunk[row, :n] = tokens[row, start[row] : start[row] + n]
            hidden, cache = extend(weights, cache, chunk, start, np.array(lengths, np.int32))
            for row, n in enumerate(lengths):
                states = expected[row, start[row] : start[row] + n]
                np.testing.assert_allclose(hidden[row, :n], states, atol=bound)
            start = start + np.array(lengths, np.int32)
        for _ in range(3):
            visible = np.arange(LENGTH) <= start[:, None]
            step = tokens[np.arange(3), start]
            hidden, cache = decode(weights, cache, step, start, visible, start)
            np.testing.assert_allclose(hidden, expected[np.arange(3), start], atol=bound)
            start = start + 1


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, True)])
def test_attention_over_the_parts_of_a_cache(softcap: float | None, sinks: bool) -> None:
    """To the bit the same for a row, however long the others are, and in parts that are arrays; that of the formula."""
    rng = np.random.default_rng(2)
    time, length = (1 if softcap is None else 3), 7 * CACHE_PART + 40
    shapes = ((3, 2, 2, time, 8), (3, 2, 8, length), (3, 2, length, 8))
    q, keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    sizes = cache_parts(length)
    assert sizes == (CACHE_PART, CACHE_PART, 2 * CACHE_PART, 3 * CACHE_PART, 40)
    more = {
        "softcap": softcap,
        "sinks": jnp.asarray(rng.normal(size=(2, 2)), jnp.bfloat16) if sinks else None,
    }
    over = jax.jit(partial(attend_cached, in_order=True))
    first = None
    for last in (
        [30, -1, 7],
        [30, CACHE_PART + 40, 7],
        [30, 5 * CACHE_PART + 1, 7],
        [30, length - 1, 7],
    ):  # -1: a row that sees nothing
        until = np.array(last)[:, None] - np.arange(time)[::-1]
        seen = jnp.asarray(np.arange(length) <= until[..., None])
        found = np.asarray(over(q, keys, values, seen, **more))
        parted = over(q, cut(keys, sizes, 3), cut(values, sizes, 2), seen, **more)
        np.testing.assert_array_equal(found, parted)
        dense = np.asarray(attend_cached(q, keys, values, seen, **more))
        rows = np.array(last) >= 0
        np.testing.assert_allclose(found[rows], dense[rows], atol=1e-5)
        assert np.isfinite(found).all()
        first = found if first is None else first
        np.testing.assert_array_equal(found[[0, 2]], first[[0, 2]])
