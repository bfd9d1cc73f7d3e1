"""The reference that moves: compiled without being moved, and kept to the bit."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import numpy as np

from rlhf_core.training import Reference


def arrays(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_compiling_its_move_does_not_move_it(tiny: ModuleType) -> None:
    """A call in order to compile would be a move."""
    params = {
        "w": np.random.default_rng(0).normal(size=1000).astype(np.float32),
        "base": np.ones(3, np.float32),
    }
    params = jax.device_put(params)
    reference = Reference(params, "base", tiny.one_device())
    before = arrays(reference.params)
    compiled: list[str] = []

    def note(event: str, _: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(about.get("fun_name")))

    reference.compile(0.9)
    assert arrays(reference.params) == before
    reference._compiler.wait("mix")
    jax.monitoring.register_event_duration_secs_listener(note)
    policy = jax.device_put({"w": np.zeros(1000, np.float32), "base": np.ones(3, np.float32)})
    reference.move(policy, 0.9)
    assert compiled == []
    np.testing.assert_allclose(reference.params["w"], 0.1 * params["w"], rtol=1e-5)
    kept = reference.snapshot()
    moved = arrays(reference.params)
    reference.move(policy, 0.9)
    reference.restore(kept)
    assert arrays(reference.params) == moved
