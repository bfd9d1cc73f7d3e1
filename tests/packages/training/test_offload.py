"""State that waits in the host's memory: the same bits, resumed too, and what a forecast says of it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from rlhf_core import create_state
from rlhf_core.mesh import HOST
from rlhf_core.training import Reference, memory

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
