"""Memory from shapes: what is exact against the sizes of real arrays, the estimate against a hand count."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
from rlhf_grpo import GRPOConfig

from rlhf_core.mesh import make_mesh, planned_mesh
from rlhf_core.plugins import installed_registry
from rlhf_core.sampling import cache_bytes
from rlhf_core.training import definition_of, memory, saved_bytes


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_a_cache_is_exact(tiny):
    model = tiny.make_model(scale=4.0)
    tokens = np.zeros((5, 8), np.int32)
    _, cache = model.definition.prefill(model.params, tokens, tokens, tokens + 8)
    assert cache_bytes(model.definition, 5, 30) == size(model.definition.ring(cache, 30, 0))


def test_activations_grow_with_the_tokens(tiny):
    definition = tiny.make_model(scale=4.0).definition
    one, two = (saved_bytes(definition, (n, 32)) for n in (8, 16))
    widths = 2 * (8 * 16 + 4 * 16 + 4 * 24) * 4  # layers × (hidden, heads, intermediate) × bytes, roughly
    assert 0.5 < one / (8 * 32 * widths) < 4
    assert 1.8 < two / one < 2.2


def test_what_describes_a_model(tiny, tmp_path):
    tokenizer = tiny.make_tokenizer()
    found = definition_of({**tiny.SIZES, "tokenizer": "somewhere"}, "lm", tokenizer)
    assert found is not None
    definition, hf_config = found
    assert (definition.vocab_size, hf_config["max_position_embeddings"]) == (len(tokenizer), 128)
    tiny.make_model(scale=4.0).save(tmp_path)
    loaded = definition_of(str(tmp_path), "score", None)
    assert loaded is not None
    assert loaded[0].abstract_params()["score"]["kernel"].shape == (16, 1)
    assert definition_of("owner/name", "lm", None) is None
    assert definition_of(tiny.SIZES, "lm", None) is None  # its vocabulary is the tokenizer's


def test_a_reward_model_counts_with_what_scoring_holds(tiny, tmp_path):
    model = tiny.make_model("score", scale=4.0)
    model.save(tmp_path)
    widths = 16_384 * 16 * 12 * 4  # micro-batch slots × hidden size × arrays per layer × bytes per number
    assert memory.scoring_bytes(str(tmp_path), None, None) == size(model.params) + widths
    assert memory.scoring_bytes("rm.model", None, None) is None


def test_a_process_is_compared_with_its_machine(monkeypatch):
    parts = {"parameters": 10**9, "gradients": 10**9, "optimizer": 2 * 10**9, "activations": 10**9}
    monkeypatch.setattr(memory, "machine_memory", lambda: 64 * 10**9)
    made = memory.memory_forecast(parts)
    # The arrays, a copy of what is saved, the libraries, and what the allocator cannot use again.
    assert made.memory is not None
    assert made.memory >= sum(parts.values()) + 3 * 10**9 + memory.PROCESS
    assert "copies while saving 4.0 GB" in made.lines[0]
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 * 10**9)
    (warning,) = memory.memory_forecast(parts).warnings
    assert warning.startswith("memory: about ")
    assert "this machine has 8.0 GB" in warning
    # Devices that need not be there are not compared, and hold the arrays alone.
    assert memory.memory_forecast(parts, None, planned_mesh(8)).memory == sum(parts.values())


def test_the_machine_and_its_peak():
    there = memory.machine_memory()
    assert there is not None
    assert 2**28 < there < 2**50
    # In a process of its own: one that has run tests has freed memory to hand out again.
    script = """
import numpy as np
from rlhf_core.runtime import peak_memory
peak_memory.forget_peak()
before = peak_memory.peak_host_bytes()
held = np.ones(200_000_000 // 8)
print(held.nbytes * 0.9 < peak_memory.peak_host_bytes() - before < held.nbytes * 1.5)
del held
peak_memory.forget_peak()
print(peak_memory.peak_host_bytes() < before + 100_000_000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True" if sys.platform == "linux" else "False"]


def test_what_is_left_for_sampling(tiny, monkeypatch):
    """Adam's state on four shards, and a copy of the parameters as large as their gradients."""
    model = tiny.make_model(scale=4.0)
    mesh = make_mesh(data=2, fsdp=4)
    config = GRPOConfig(model="m", rewards=["length"])
    stage = SimpleNamespace(inputs={})
    context = SimpleNamespace(config=config, mesh=mesh, registry=installed_registry(), stage=stage)
    reads_a_model = SimpleNamespace(function=SimpleNamespace(model="rm"))
    assert memory.sampling_memory(context, model, [], []) is None  # CPUs do not say what they have
    monkeypatch.setattr(memory, "device_memory", lambda: 1_000_000)
    placed = jax.device_put(model.params, model.definition.shardings(mesh))
    here = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    left = memory.sampling_memory(context, model, [], [])
    assert 0 <= 900_000 - 4 * here - left < 100  # parameters, gradients, two moments and counters
    monkeypatch.setattr(memory, "scoring_bytes", lambda *_: 800)
    assert memory.sampling_memory(context, model, [reads_a_model] * 2, []) == left - 200
    monkeypatch.setattr(memory, "device_memory", lambda: 1000)
    assert memory.sampling_memory(context, model, [], []) == 0
