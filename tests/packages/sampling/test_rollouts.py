"""`Rollouts`: four fields that every sampler gives, three that are filled in, and a named tuple all the same."""

from __future__ import annotations

import pickle

import jax
import numpy as np
import pytest

from rlhf_core import Rollouts

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


def test_rollouts_are_a_named_tuple_and_a_pytree(samples: Rollouts) -> None:
    assert Rollouts._fields == ("tokens", "lengths", "logps", "finished", "mask", "version", "routes")
    later = samples._replace(version=samples.version + 1)
    assert len(jax.tree.leaves(samples)) == 7
    again = pickle.loads(pickle.dumps(later))
    assert type(again) is Rollouts
    np.testing.assert_array_equal(again.version, 1)
