"""Memory of each device of a mesh that is only planned, against what eight virtual devices hold; state that waits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest

from rlhf_core import create_state, optimizers
from rlhf_core.mesh import HOST, make_mesh, planned_mesh, put_rows, rows_per_device
from rlhf_core.metrics import Mean
from rlhf_core.models import fresh_model
from rlhf_core.step import Programs
from rlhf_core.training import Reference, memory

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
