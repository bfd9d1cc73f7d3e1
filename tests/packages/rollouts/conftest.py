"""Six completions of two prompts."""

import numpy as np
import pytest

from rlhf_core import Rollouts

TOKENS = 4
"""Of the longest completion."""
END = 1


@pytest.fixture
def samples():
    """Six completions of one to four tokens; the second and the last were cut."""
    lengths = np.array([2, 4, 1, 3, 2, 4], np.int32)
    finished = np.array([True, False, True, True, True, False])
    tokens = np.arange(3, 3 + 6 * TOKENS, dtype=np.int32).reshape(6, TOKENS)
    tokens[np.arange(TOKENS) >= lengths[:, None]] = 0
    tokens[finished, lengths[finished] - 1] = END
    logps = np.where(tokens > 0, -np.arange(6 * TOKENS, dtype=np.float32).reshape(6, TOKENS) / 10, 0)
    return Rollouts(tokens, lengths, logps.astype(np.float32), finished)
