"""Tensors of files, block by block, become what NumPy's own cast and transpose give, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_core.models.safetensors import BLOCK, DTYPES, copy

SHAPES = [(1, 1), (3, 5), (BLOCK[0], BLOCK[1]), (2 * BLOCK[0] + 3, 7), (5, BLOCK[1] + 9), (1, 40), (40, 1)]


def bits(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Every kind of number that the dtype has: subnormal, infinite and NaN too."""
    size = np.dtype(dtype).itemsize
    whole = np.random.default_rng(0).integers(0, 256, (*shape, size), np.uint8)
    found: np.ndarray = whole.view(dtype)[..., 0]
    return found


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_transposed_matrix(dtype: Any, shape: tuple[int, int]) -> None:
    stored = bits(dtype, shape[::-1])
    out = np.full(shape, 7, np.float32)
    copy(stored.T, out)
    np.testing.assert_array_equal(
        out.view(np.uint32), np.ascontiguousarray(stored.astype(np.float32).T).view(np.uint32)
    )


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_a_part_of_one_into_a_part_of_another(dtype: Any) -> None:
    """As a device reads its shard."""
    stored, out = bits(dtype, (70, 50)), np.full((3, 31, 45), 7, np.float32)
    copy(stored.T[11:42, 20:65], out[1])
    expected = stored.astype(np.float32).T[11:42, 20:65]
    np.testing.assert_array_equal(out[1].view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))
    assert (out[[0, 2]] == 7).all()


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
@pytest.mark.parametrize("shape", [(9,), (6, 4)])
def test_arrays_are_copied_as_stored(dtype: Any, shape: tuple[int, ...]) -> None:
    stored = bits(dtype, shape)
    out = np.full(shape, 7, np.float32)
    copy(stored, out)
    np.testing.assert_array_equal(out.view(np.uint32), stored.astype(np.float32).view(np.uint32))
