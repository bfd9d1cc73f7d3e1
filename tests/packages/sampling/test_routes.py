"""What rollouts hold besides tokens: fields that are filled in, and experts on their way into rows that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import Rollouts
from rlhf_core.contracts import SamplerInputs
from rlhf_core.mesh import make_mesh
from rlhf_core.models import fresh_model, recording
from rlhf_core.objective import trained_logps
from rlhf_core.packing import Layout, Tree, pack
from rlhf_core.sampling import Sampler, SamplingOptions
from tests.shared.mesh_cases import FAMILIES


def test_a_trainer_replays_the_experts_of_a_sampler(in_slots: Callable[..., None]) -> None:
    """Slots are fewer than sequences, so that these begin at different steps."""
    in_slots(4)
    model = fresh_model(FAMILIES["mixtral"], seed=3, mesh=make_mesh(devices=jax.devices()[:1]))
    definition, draw = model.definition, np.random.default_rng(0)
    prompts = [draw.integers(3, 36, n).astype(np.int32) for n in (4, 7, 5)]
    sampler = Sampler(
        SamplerInputs(
            definition=definition,
            options=SamplingOptions(max_completion_length=6, stop_token_ids=tuple(range(12))),
            mesh=model.mesh,
            stop_ids=(2,),
            num_generations=3,
            prompts_per_call=3,
            max_prompt_length=8,
            routes=True,
        )
    )
    found = sampler(model.params, prompts, jax.random.key(1))
    assert found.routes.shape == (9, 6, 2, 2)
    assert found.routes.dtype == np.int8
    assert len(set(found.lengths.tolist())) > 1
    known = np.arange(6) < found.lengths[:, None] - 1
    np.testing.assert_array_equal((found.routes >= 0).all((2, 3)), known)

    flat = found.routes.reshape(9, 6, -1)
    trees = [
        Tree(
            prompt,
            tuple(found.tokens[i, : found.lengths[i]] for i in range(3 * n, 3 * n + 3)),
            routes=tuple(flat[i, : found.lengths[i]] for i in range(3 * n, 3 * n + 3)),
        )
        for n, prompt in enumerate(prompts)
    ]
    (batch,) = pack(trees, Layout((32,), (3,), (3,), (18,)))
    assert batch.routes is not None

    @jax.jit
    def read(params: Any, batch: Any) -> Any:
        with recording([definition], jnp.asarray(batch.rows.visible_until) > 0, batch.routes) as recorder:
            logps, _ = trained_logps(definition, params, batch)
        return logps, recorder.found[0][1].replayed

    logps, replayed = read(model.params, batch)
    assert replayed.tolist() == [[known.sum(), 0]] * 2  # the router of the trainer agrees
    for n in range(3):
        own = np.concatenate([found.logps[i, : found.lengths[i]] for i in range(3 * n, 3 * n + 3)])
        row = batch.example[:, 0].tolist().index(n)
        np.testing.assert_allclose(logps[row][: len(own)], own, atol=2e-5)

    other = jax.tree.map(np.array, batch.routes)
    other[other >= 0] = (other[other >= 0] + 1) % 4
    changed, replayed = read(model.params, batch._replace(routes=other))
    assert replayed[:, 1].min() > 0
    assert np.abs(np.asarray(changed) - np.asarray(logps)).max() > 1e-3


LENGTHS = np.array([2, 3, 1], np.int32)


@pytest.fixture
def samples() -> Rollouts:
    tokens = np.array([[5, 6, 0], [7, 8, 9], [1, 0, 0]], np.int32)
    return Rollouts(tokens, LENGTHS, np.zeros((3, 3), np.float32), np.array([True, False, True]))


def test_the_policy_wrote_all_tokens_unless_the_sampler_says_otherwise(samples: Rollouts) -> None:
    assert samples.mask.dtype == np.bool_
    np.testing.assert_array_equal(samples.mask, [[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    assert samples.version.dtype == np.int32
    np.testing.assert_array_equal(samples.version, [0, 0, 0])
    mask = samples.mask & ~np.array([False, True, False])
    given = Rollouts(*samples[:4], mask=mask, version=np.full(3, 7, np.int32))
    assert given.mask is mask
    np.testing.assert_array_equal(given.version, 7)
