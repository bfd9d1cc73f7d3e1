"""pass@k against the definition: the share of the k-subsets of n completions in which one passes."""

from itertools import combinations

import numpy as np
import pytest

from rlhf_core.rollouts.fixed_prompts import pass_at_k


@pytest.mark.parametrize("n", [1, 3, 6, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
    passed = np.random.default_rng(n).random((4, n)) < 0.3
    passed[0] = False
    found = pass_at_k(passed)
    assert list(found) == {1: ["pass@1"], 3: ["pass@1", "pass@2", "pass@3"]}.get(
        n, [f"pass@{k}" for k in (1, 2, 4, n)]
    )
    for name, value in found.items():
        subsets = list(combinations(range(n), int(name.partition("@")[2])))
        assert value == pytest.approx(np.mean([[row[list(s)].any() for s in subsets] for row in passed]))
