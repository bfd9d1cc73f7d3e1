"""Memory from shapes: against the arrays of eight virtual devices, where it is exact, and against a hand count."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from rlhf_grpo import GRPOConfig

from rlhf_core import create_state, optimizers
from rlhf_core.mesh import HOST, make_mesh, planned_mesh, put_rows, rows_per_device
from rlhf_core.metrics import Mean
from rlhf_core.models import fresh_model
from rlhf_core.plugins import installed_registry
from rlhf_core.sampling import cache_bytes
from rlhf_core.step import Programs
from rlhf_core.training import Reference, definition_of, memory, saved_bytes

UNEVEN = {"hidden_size": 20, "intermediate_size": 36, "vocab_size": 50}
"""Sizes that 8 does not divide, some not even 4: they stay whole on an axis of that size."""


def held(tree: Any) -> set[int]:
    """Bytes of `tree` on each device, as a set: of one number where all hold as much."""
    on = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            on[shard.device] += shard.data.nbytes
    return set(on.values())


@cache
def model_on(tiny: ModuleType, mesh: Any, head: Any = "lm", **sizes: Any) -> Any:
    """A model that all tests share, which change nothing of it."""
    return fresh_model({"vocab_size": 48, **tiny.SIZES, **sizes}, head, mesh=mesh)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 2, 2), {}),
        ((1, 4, 2), UNEVEN),
        *(pytest.param(shape, {}, marks=pytest.mark.long) for shape in ((8, 1, 1), (1, 8, 1))),
        *(pytest.param(shape, UNEVEN, marks=pytest.mark.long) for shape in ((1, 8, 1), (1, 1, 8))),
    ],
    ids=str,
)
def test_parameters_and_optimizer_are_exact(
    shape: tuple[int, int, int], sizes: dict[str, int], tiny: ModuleType
) -> None:
    model = model_on(tiny, make_mesh(*shape), **sizes)
    told = memory.state_bytes(replace(model, mesh=planned_mesh(8, *shape)), optimizers.adamw(1e-3))
    assert held(model.params) == {told["parameters"]} == {told["gradients"]}
    assert held(create_state(model, optimizers.adamw(1e-3)).opt_state) == {told["optimizer"]}
    alone = memory.state_bytes(replace(model, mesh=planned_mesh(1)), optimizers.adamw(1e-3))
    whole = shape[0] == 8 or (sizes == UNEVEN and 8 in shape)
    assert (told["parameters"] == alone["parameters"]) == whole


@pytest.mark.parametrize("name", ["adafactor", "muon", "sgd"])
def test_optimizers_that_keep_other_shapes(name: str, tiny: ModuleType) -> None:
    model, tx = model_on(tiny, make_mesh(2, 2, 2), "score"), getattr(optimizers, name)(1e-3)
    told = memory.state_bytes(replace(model, mesh=planned_mesh(8, 2, 2, 2)), tx)
    assert held(create_state(model, tx).opt_state) == {told["optimizer"]}


def test_what_is_not_trained(tiny: ModuleType) -> None:
    """Adapters alone have gradients and a state; frozen parameters have none."""
    shape, tx = (2, 2, 2), optimizers.adamw(1e-3)
    adapted = model_on(tiny, make_mesh(*shape)).with_lora(rank=4)
    for model, frozen in ((adapted, None), (model_on(tiny, make_mesh(*shape)), "embed_tokens|norm")):
        state = create_state(model, tx, frozen=frozen)
        told = memory.state_bytes(replace(model, mesh=planned_mesh(8, *shape)), tx, frozen)
        assert held(model.params) == {told["parameters"]}
        assert held(state.trained().params) == {told["gradients"]}
        assert held(state.opt_state) == {told["optimizer"]}
        assert told["gradients"] < told["parameters"]


def test_gradients_of_a_step_are_placed_so(tiny: ModuleType) -> None:
    mesh = make_mesh(1, 4, 2)
    model = model_on(tiny, mesh, **UNEVEN)

    def objective(params: Any, tokens: Any) -> tuple[Mean, dict[str, Any]]:
        return Mean.of(model.definition.hidden(params, tokens, tokens, tokens + 8)), {}

    state = create_state(model, optax.identity())
    done = Programs(objective, state).accumulate(state, put_rows(mesh, np.zeros((8, 8), np.int32)), None)
    told = memory.state_bytes(replace(model, mesh=planned_mesh(8, fsdp=4, tensor=2)), optax.identity())
    assert held(done.grads) == {told["gradients"]}


def test_rows_of_a_device() -> None:
    assert [rows_per_device(planned_mesh(8, fsdp=2, tensor=2), n) for n in (1, 4, 5)] == [1, 1, 2]


def test_devices_that_are_not_here(tiny: ModuleType) -> None:
    many = planned_mesh(4096, fsdp=16)
    assert dict(many.shape) == {"data": 256, "fsdp": 16, "expert": 1, "context": 1, "tensor": 1}
    model = model_on(tiny, make_mesh(2, 2, 2))
    alone = memory.state_bytes(replace(model, mesh=planned_mesh(1)), optax.identity())
    kernels = memory.state_bytes(replace(model, mesh=many), optax.identity())
    assert alone["parameters"] / 16 <= kernels["parameters"] < alone["parameters"] / 12


BOTH = ["optimizer", "reference"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*offload. has no effect on CPUs")
def test_a_run_has_the_same_bits_where_its_state_waits_also_resumed(short: Any) -> None:
    plain, _ = short.train("grpo", at="plain")
    short.train("grpo", at="waits", offload=BOTH, max_training_steps=1)
    after, _ = short.train("grpo", at="waits", offload=BOTH)
    assert plain.keys() == after.keys()
    for name, leaf in plain.items():
        np.testing.assert_array_equal(after[name], leaf, err_msg=name)


def test_what_waits_is_not_counted_for_devices(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.make_model()
    state = create_state(model, optax.adamw(1e-3), offload=True)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)}
    reference = Reference(model.params, None, model.mesh, offload=True)
    assert kinds == {HOST}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(reference.copied)} == {HOST}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(reference.params)} == {"device"}
    assert reference.equals(model.params)
    parameters = memory.device_bytes(model.params)
    assert memory.host_bytes(reference.copied) == parameters == memory.device_bytes(reference.copied)
    monkeypatch.setattr(memory, "platform", lambda: "gpu")
    assert memory.device_bytes(reference.copied) == 0 == memory.device_bytes(state.opt_state)
    assert memory.host_bytes(state.opt_state) > 2 * parameters


def whole_size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_a_cache_is_exact(tiny):
    model = tiny.make_model(scale=4.0)
    tokens = np.zeros((5, 8), np.int32)
    _, cache = model.definition.prefill(model.params, tokens, tokens, tokens + 8)
    assert cache_bytes(model.definition, 5, 30) == whole_size(model.definition.ring(cache, 30, 0))


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
    assert memory.scoring_bytes(str(tmp_path), None, None) == whole_size(model.params) + widths
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
from rlhf_core.runtime import machine
machine.forget_peak()
before = machine.peak_host_bytes()
held = np.ones(200_000_000 // 8)
print(held.nbytes * 0.9 < machine.peak_host_bytes() - before < held.nbytes * 1.5)
del held
machine.forget_peak()
print(machine.peak_host_bytes() < before + 100_000_000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True" if sys.platform == "linux" else "False"]


def test_what_is_left_for_sampling(tiny, monkeypatch):
    """Adam's state on four shards, and a copy of the parameters as large as their gradients."""
    model = tiny.make_model(scale=4.0)
    mesh = make_mesh(data=2, fsdp=4)
    config = GRPOConfig(model="m", rewards=["length"])
    registry = installed_registry()
    context = SimpleNamespace(config=config, mesh=mesh, registry=registry, described_by=lambda model: model)
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
