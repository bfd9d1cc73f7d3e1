"""Pairs of two equal replies tie to the last bit in padded batches, wherever the padding is."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import optax
import pytest
from rlhf_reward import evaluation_step

from rlhf_core import create_state


@pytest.mark.parametrize("on_the_left", [pytest.param(False, marks=pytest.mark.long), True])
def test_padded_batches(tiny: ModuleType, on_the_left: bool) -> None:
    """The rejected side is three tokens wider, of padding."""
    model = tiny.make_model("score", scale=4.0)
    draw = np.random.default_rng(0)
    ids, lengths = draw.integers(3, 40, (8, 12)), draw.integers(2, 13, 8)
    mask = (np.arange(12) < lengths[:, None]).astype(int)
    if on_the_left:
        ids, mask = ids[:, ::-1], mask[:, ::-1]
    wider = ((0, 0), (3, 0) if on_the_left else (0, 3))
    batch = {
        "input_ids_chosen": ids,
        "attention_mask_chosen": mask,
        "input_ids_rejected": np.pad(np.where(mask, ids, 7), wider, constant_values=5),
        "attention_mask_rejected": np.pad(mask, wider),
    }
    batch["input_ids_rejected"][0, 3 if on_the_left else 0] = 41
    batch["attention_mask_rejected"][0, 3 if on_the_left else 0] = 1
    found = evaluation_step(create_state(model, optax.sgd(0.1)), batch)
    assert float(found["ties"]) == 7 / 8
