"""Runs of TRL's KTOTrainer, recorded by benchmarks/interop/kto.py: loss, estimate, gradient, rewards by update."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_kto import KTOConfig
from safetensors.numpy import load_file, save_file

from rlhf_core.models import fresh_model

RECORDED = json.loads(Path(__file__).with_name("trl.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, repository: Path, tiny: ModuleType) -> str:
    """The model that TRL trained, as a directory."""
    side = runpy.run_path(str(repository / "benchmarks/interop/kto.py"))
    directory = tmp_path_factory.mktemp("trl")
    tokenizer = side["make_tokenizer"]()
    fresh_model(RECORDED["model"], "lm", tokenizer=tokenizer, mesh=tiny.one_device()).save(directory)
    tensors = load_file(directory / "model.safetensors")
    made = {name: side["weight"](name, tensor.shape) for name, tensor in tensors.items()}
    save_file(made, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


@pytest.mark.parametrize("loss", RECORDED["steps"])
def test_every_update_is_trls(loss: str, model: str, tiny: ModuleType, tmp_path: Path) -> None:
    """TRL reads a prompt with the completion before it, we with the one after it: an update's rows are reversed."""
    settings: dict[str, Any] = dict(RECORDED["settings"])
    size, rows = settings.pop("batch"), RECORDED["rows"]
    config = KTOConfig(
        **settings,
        loss=loss,
        total_batch_size=size,
        max_training_steps=len(RECORDED["steps"][loss]),
        shuffle_train_dataset=False,
        optimizer="sgd",
        scheduler="constant",
        weight_decay=0.0,
        max_grad_norm=None,
        log_steps=1,
    )
    given = [row for start in range(0, len(rows), size) for row in rows[start : start + size][::-1]]
    with pytest.warns(UserWarning, match="set desirable_weight = 0.29, or undesirable_weight = 3.9"):
        tiny.run("kto", config, tmp_path, model=model, train_dataset=given)
    logged = tiny.read_rows(tmp_path / "metrics.jsonl")
    for found, expected in zip(logged, RECORDED["steps"][loss], strict=True):
        known = {name: value for name, value in expected.items() if name in found}
        assert set(expected) - set(known) == ({"kl"} if loss == "apo_zero_unpaired" else set())
        for name, value in known.items():
            # A reward is a small difference of log-probabilities of up to 30 nats; later updates have the rounding of
            # all before them.
            near = 2e-5 if name.startswith("rewards/") else 1e-9
            assert found[name] == pytest.approx(value, rel=2e-5, abs=near), name
