"""Adapters through the trainers: what is trained, saved and trained on, and continuing to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlhf_core import load_model
from rlhf_core.errors import InputError
from tests.shared.interrupts import interrupt

LORA = {"rank": 2, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
TRAINERS = ["sft", "reward", "grpo", "dpo", "online_dpo"]


@pytest.fixture
def based(short: Any, tmp_path: Path) -> Any:
    """(trainer, **changes) → what `short.train` returns, with adapters on a base model in a directory."""

    def train(trainer: str, **changes: Any) -> Any:
        base = tmp_path / f"base.{trainer}"
        if not base.is_dir():
            short.models[trainer].save(base)
        changes = {"lora": LORA, **({"sync_ref_model": False} if trainer == "grpo" else {}), **changes}
        return short.train(trainer, inputs={"model": str(base)}, **changes)

    return train


@pytest.mark.parametrize(
    "trainer",
    [name if name == "sft" else pytest.param(name, marks=pytest.mark.long) for name in TRAINERS],
)
def test_adapters_learn_and_the_base_stays(
    based: Any, short: Any, tiny: ModuleType, tmp_path: Path, trainer: str
) -> None:
    after, watch = based(trainer)
    assert watch.last("grad_norm") > 0
    before = tiny.leaves(short.models[trainer].params)
    for name, leaf in after.items():
        if "adapter" in name:
            assert "lora_a" in name or np.abs(leaf).max() > 0  # B began at zero
        else:
            changed = not np.array_equal(leaf, before[name])
            assert changed == name.startswith("score"), name
    artifact = tmp_path / trainer / "artifacts" / "model"
    assert not (artifact / "config.json").exists()
    assert not (artifact / "model.safetensors").exists()
    config = json.loads((artifact / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 8)
    assert config["base_model_name_or_path"] == str((tmp_path / f"base.{trainer}").resolve())
    checkpoint = sum(x.stat().st_size for x in (tmp_path / trainer / "checkpoints").rglob("*") if x.is_file())
    assert checkpoint == 0 or checkpoint < 10**6


@pytest.mark.parametrize(
    "trainer",
    [
        "reward",
        pytest.param("grpo", marks=pytest.mark.long),
        *(pytest.param(trainer, marks=pytest.mark.exhaustive) for trainer in ("sft", "dpo", "online_dpo")),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(based: Any, tiny: ModuleType, trainer: str) -> None:
    """Dropout too: it is drawn from the update's number."""
    lora = {**LORA, "dropout": 0.3}
    given = {"lora": lora, "max_training_steps": 4}
    whole, _ = based(trainer, at="whole", **given)
    with pytest.raises(KeyboardInterrupt):
        based(trainer, at="parts", save_steps=1, listeners=[interrupt(3)], **given)
    parts, watch = based(trainer, at="parts", save_steps=1, **given)
    assert watch.steps()[0] > 1
    for name, leaf in whole.items():
        np.testing.assert_array_equal(parts[name], leaf, err_msg=name)


def test_the_next_stage_trains_the_adapter_on_or_merges_it(
    based: Any, short: Any, tiny: ModuleType, tmp_path: Path
) -> None:
    based("sft", max_training_steps=2)
    adapter = str(tmp_path / "sft" / "artifacts" / "model")
    more, _ = short.train("sft", at="on", inputs={"model": adapter}, lora=LORA, max_training_steps=1)
    assert any("adapter" in name for name in more)
    base = json.loads((tmp_path / "on/sft/artifacts/model/adapter_config.json").read_text())
    assert base["base_model_name_or_path"] == str((tmp_path / "base.sft").resolve())
    with pytest.warns(UserWarning, match="merging its adapter and training all parameters"):
        whole, _ = short.train(
            "sft", at="merged", inputs={"model": adapter}, learning_rate=1e-12, max_training_steps=1
        )
    merged = tiny.leaves(load_model(adapter, mesh=tiny.one_device()).merged().params)
    assert set(whole) == set(merged)
    for name, leaf in whole.items():
        np.testing.assert_allclose(leaf, merged[name], atol=1e-6, err_msg=name)
    with pytest.raises(InputError, match=r"'sft'\.lora: the model already has adapters of rank 2, alpha 8"):
        short.train("sft", at="other", inputs={"model": adapter}, lora={"rank": 4})

    with pytest.raises(InputError, match=r"lora: an adapter needs a base model in a directory"):
        short.train("sft", lora={})
