"""Tokenizers that name no end-of-sequence token, or one that stands for unknown text: every trainer says so."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rlhf_dpo import DPOConfig
from rlhf_reward import RewardConfig
from rlhf_sft import SFTConfig

from rlhf_core import plugins
from rlhf_core.training import OnDevices

MISSING = "neither the tokenizer nor generation_config.json names an end-of-sequence token"


def without_eos(tiny: ModuleType) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


@pytest.mark.parametrize(
    ("config", "opened"), [(SFTConfig, "texts"), (RewardConfig, "pairs"), (DPOConfig, "pairs")]
)
def test_a_run_warns_once(config: Any, opened: str, tiny: ModuleType, tmp_path: Path) -> None:
    rows = [{**row, "completion": row["chosen"]} for row in tiny.pairs(4)]
    stage = SimpleNamespace(
        name="s", seed=0, is_main=True, mesh=tiny.one_device(), inputs={"train_dataset": rows, "eval_dataset": rows},
        registry=plugins.load().registry, dir=tmp_path, template_date=None, say=print,
    )  # fmt: skip
    context = OnDevices(config(), stage)
    context.tokenizer = without_eos(tiny)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for field in ("train_data", "eval_data"):
            getattr(context, opened)(field)
    assert sum(f"stage 's'.model: {MISSING}" in str(each.message) for each in caught) == 1
