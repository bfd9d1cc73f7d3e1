"""Pairs of two equal replies tie to the last bit in training too, wherever in their rows the replies lie."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest
from rlhf_dpo import DPOConfig
from rlhf_dpo.losses import Sigmoid
from rlhf_dpo.objective import SAME as DPO_SAME
from rlhf_dpo.objective import objective as dpo_objective
from rlhf_dpo.objective import pair_loss as dpo_pair_loss
from rlhf_dpo.reference import PairSet
from rlhf_reward import RewardConfig, evaluation_step
from rlhf_reward.losses import BradleyTerry
from rlhf_reward.objective import SAME, mark_equal_pairs, objective, pair_loss

from rlhf_core import create_state, data
from rlhf_core.fit.batches import choose_row_layout
from rlhf_core.metrics import Metric, fetch_metrics, merge
from rlhf_core.packing.rows import pack


def rows(tiny: ModuleType) -> list[dict[str, Any]]:
    """Equal replies after prompts of many lengths; every fourth pair differs."""
    given = tiny.pairs(32, seed=3)
    return [row if i % 4 == 0 else {**row, "rejected": row["chosen"]} for i, row in enumerate(given)]


@pytest.fixture(scope="module")
def pairs(tiny: ModuleType) -> Any:
    return data.encode_pairs(data.load(rows(tiny)), tiny.make_tokenizer(), max_length=64, completions=True)


def differ(pairs: Any) -> int:
    trees = pairs.trees()
    return sum(not np.array_equal(*trees[i].branches) for i in range(len(trees)))


def test_reward(tiny: ModuleType, pairs: Any) -> None:
    model = tiny.make_model("score", scale=4.0)
    trees = mark_equal_pairs(pairs.trees())
    layout = choose_row_layout(
        trees, RewardConfig(), model.mesh, model.definition.hidden_size, reads_tokens=False
    )
    batches = pack([trees[i] for i in range(len(trees))], layout, sequence_names=("margin", SAME), group=2)
    measure = partial(pair_loss, BradleyTerry(), coefficient=None, name="bradley_terry")
    compute = jax.jit(partial(objective, model.definition, measure))
    metrics: dict[str, Metric] = {}
    for batch in batches:
        metrics = merge(metrics, compute(model.params, batch)[1])
    found = fetch_metrics(metrics)
    assert found["ties"] == pytest.approx((len(trees) - differ(pairs)) / len(trees))
    assert found["accuracy"] <= differ(pairs) / len(trees)


@pytest.mark.long
def test_dpo(tiny: ModuleType, pairs: Any) -> None:
    model = tiny.make_model("lm", scale=4.0)
    known = PairSet.of(pairs)
    known.reference[:] = -3.0
    layout = choose_row_layout(
        known.trees, DPOConfig(), model.mesh, model.definition.hidden_size, reads_tokens=True
    )
    names = ("reference", "tokens", DPO_SAME)
    batches = pack([known.trees[i] for i in range(len(known.trees))], layout, sequence_names=names, group=2)
    seen = []

    def measure(inputs: Any, present: Any) -> Any:
        seen.append((inputs.ratio_chosen, inputs.ratio_rejected, present))
        return dpo_pair_loss(Sigmoid(), inputs, present, name="sigmoid")

    metrics: dict[str, Metric] = {}
    for batch in batches:
        found = dpo_objective(model.definition, measure, model.params, batch, beta=0.1)[1]
        metrics = merge(metrics, found)
    chosen, rejected, present = (np.concatenate(x) for x in zip(*seen, strict=True))
    assert int((chosen == rejected)[present].sum()) == len(known.trees) - differ(pairs)
    assert fetch_metrics(metrics)["rewards/accuracies"] <= differ(pairs) / len(known.trees)
    assert known.same.sum() == len(known.trees) - differ(pairs)


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
