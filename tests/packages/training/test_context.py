"""Stages on a mesh whose axis `context` cuts rows: what they refuse, and that they train what one device does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rlhf_distill import DistillConfig
from rlhf_dpo import DPOConfig
from rlhf_kto import KTOConfig
from rlhf_reward import RewardConfig
from rlhf_sft import SFTConfig

from rlhf_core import load_model
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from tests.shared.plans import file_of

SHARED: dict[str, Any] = {
    "learning_rate": 1e-3,
    "optimizer": "sgd",
    "total_batch_size": 8,
    "max_training_steps": 2,
    "log_steps": 1,
}


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "head_dim": 8,
}


COMPARED = ("loss", "grad_norm", "accuracy", "margin", "kl", "eval_kl")


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["sft", "reward", "dpo", "kto", "distill"])
def test_a_stage_trains_what_it_does_on_one_device(
    trainer: str, tiny: ModuleType, short_runs: ModuleType, tmp_path: Path
) -> None:
    """Adapters, the balance of experts and evaluation too, on data 2, context 2, tensor 2."""
    configs: dict[str, Any] = {
        "sft": SFTConfig,
        "reward": RewardConfig,
        "dpo": DPOConfig,
        "kto": KTOConfig,
        "distill": DistillConfig,
    }
    rows = {"sft": tiny.texts, "distill": tiny.texts}.get(trainer, tiny.pairs)
    inputs: dict[str, Any] = {"train_dataset": rows(11), "eval_dataset": rows(3, seed=1)}
    if trainer == "distill":
        tiny.make_model(seed=2, scale=4.0).save(tmp_path / "teacher")
    sizes = EXPERTS if trainer == "sft" else {}
    more: dict[str, Any] = {
        "sft": {"router_aux_loss_coef": 0.1},
        "dpo": {"lora": {"rank": 2}},
        "distill": {"teacher": str(tmp_path / "teacher"), "on_policy_fraction": 0.0},
    }.get(trainer, {})
    tiny.make_model(scale=4.0, **sizes).save(tmp_path / "base")
    found, head = {}, "score" if trainer == "reward" else "lm"
    for name, mesh in {"one": tiny.one_device(), "cut": make_mesh(2, 1, 2, context=2)}.items():
        logged, model = short_runs.Watch(), str(tmp_path / "base")
        config = configs[trainer](**SHARED, **more)
        artifact = tiny.run(
            trainer, config, tmp_path / name, listeners=[logged], mesh=mesh, model=model, **inputs
        )
        rows_of = [{name: row[name] for name in COMPARED if name in row} for row in logged.rows]
        found[name] = rows_of, tiny.leaves(load_model(artifact.path, head, mesh=tiny.one_device()).params)
    (rows_of_one, params), (rows_of_cut, cut) = found["one"], found["cut"]
    assert len(rows_of_one) == 2
    for expected, got in zip(rows_of_one, rows_of_cut, strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, leaf in params.items():
        np.testing.assert_allclose(cut[name], leaf, atol=1e-6, err_msg=name)


def test_attention_of_whole_rows_is_refused(tiny: ModuleType, tmp_path: Path) -> None:
    config, mesh = SFTConfig(**SHARED, attention="xla"), make_mesh(-1, context=2)
    with pytest.raises(
        InputError, match=r"stage 'sft'.attention: 'xla' computes whole rows, which mesh.context cuts"
    ):
        tiny.run("sft", config, tmp_path, mesh=mesh, model=tiny.make_model(), train_dataset=tiny.texts(8))


def test_an_axis_has_one_size(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"

    def given(mesh: str, *sets: str) -> Any:
        file.write_text(f'mesh = {{ {mesh} }}\n[[stage]]\nname = "a"\ntrainer = "sft"\n')
        return file_of(file, sets=sets)

    assert given("sp = 4, data = 2").mesh == {"context": 4, "data": 2}
    assert given("sp = 4", "mesh.context=2").mesh == given("context = 4", "mesh.sp=2").mesh == {"context": 2}
    problems = given("context = 4, sp = 2").problems
    assert "mesh.context: given twice, sp is another name of it; remove one" in problems
    assert make_mesh(context=4).shape["context"] == 4
