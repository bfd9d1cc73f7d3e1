"""The products of experts in kernels, interpreted on the CPU, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from rlhf_kernels.experts import gradient_on_tpu
from rlhf_kernels.experts_gpu import expert_kernels, expert_rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_compute_the_products_of_experts(dtype: str) -> None:
    """In interpret mode, against float64: odd sizes, an expert without rows, rows behind the last expert's."""
    draw, counts = np.random.default_rng(0), np.array([37, 0, 5, 21], np.int32)
    used, ids = counts.sum(), np.repeat(np.arange(4), counts)
    x, w, d_y = (draw.normal(size=s).astype(dtype) for s in ((70, 40), (4, 40, 136), (70, 136)))
    wide, kernels, d_wide = (np.asarray(each, np.float64) for each in (x, w, d_y))
    wanted = (
        np.stack([wide[i] @ kernels[e] for i, e in enumerate(ids)]),
        np.stack([d_wide[i] @ kernels[e].T for i, e in enumerate(ids)]),
        *[np.stack([wide[:used][ids == e].T @ d_wide[:used][ids == e] for e in range(4)])] * 2,
    )
    found = (
        expert_rows(x, w, counts, interpret=True)[:used],
        expert_rows(d_y, w, counts, transposed=True, interpret=True)[:used],
        expert_kernels(x, d_y, counts, interpret=True),
        gradient_on_tpu(x, d_y, counts, interpret=True),
    )
    rounded = (1, 1, 1e-3, 1e-3) if dtype == "bfloat16" else (1e-3,) * 4
    for a, b, tolerance in zip(found, wanted, rounded, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, rtol=0, atol=5e-3 * tolerance * np.abs(b).max()
        )
