"""A run directory that is moved or copied: its adapters stay on the base model that a stage of the run made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlhf_core import Stage, artifacts, load_model
from rlhf_core.errors import InputError
from rlhf_core.models import Model, check_model
from rlhf_core.scoring import ScoringContract, base_identity

IDS, MASK = np.array([[3, 9, 4, 7]]), np.ones((1, 4), int)
ADAPTER = Path("policy/artifacts/model")


def stage(directory: Path) -> Stage:
    hook = SimpleNamespace(rlhf_artifact_saved=lambda **_: None)
    named = SimpleNamespace(name=directory.name, dir=directory, is_main=True, hook=hook, template_date=None)
    return cast("Stage", named)


def adapted(path: Path, head: Any = "lm") -> Model:
    model = load_model(path, head, seed=3).with_lora(rank=2, targets="q_proj")
    part = model.params["layers"]["self_attn"]["q_proj"]["adapter"]
    part["lora_b"] = part["lora_b"] + 0.5
    return model


def logits(path: Path, **options: Any) -> np.ndarray:
    return np.asarray(load_model(path, **options).logits(IDS, MASK))


def edit(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def run(tiny: ModuleType, tmp_path: Path) -> Path:
    """The artifacts of a stage and of one that trained adapters on its model."""
    base = artifacts.save_model(stage(tmp_path / "run/base"), "model", "language_model", tiny.make_model())
    artifacts.save_model(stage(tmp_path / "run/policy"), "model", "language_model", adapted(base.path))
    return tmp_path / "run"


def test_adapters_find_their_base_in_a_run_that_was_moved(rlhf: Any, run: Path, tmp_path: Path) -> None:
    before = logits(run / ADAPTER)
    named = json.loads((run / ADAPTER / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "../../../base/artifacts/model"
    moved = Path(shutil.move(run, tmp_path / "elsewhere"))
    np.testing.assert_array_equal(logits(moved / ADAPTER), before)
    check_model(moved / ADAPTER)
    assert rlhf("generate", str(moved / ADAPTER), "--prompt", "a b", "--max_completion_length", "1").code == 0
    assert rlhf("export", str(moved / ADAPTER), str(tmp_path / "out")).code == 0
    exported = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert exported["base_model_name_or_path"] == str((moved / "base/artifacts/model").resolve())
    # A further stage on the adapters, as one that trains them on.
    model = load_model(moved / ADAPTER)
    again = artifacts.save_model(stage(moved / "more"), "model", "language_model", model)
    saved = json.loads((again.path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "../../../base/artifacts/model"


def test_a_copy_reads_its_own_base_and_absolute_paths_of_earlier_versions_are_found_after_a_move(
    run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    assert load_model(copy / ADAPTER).source == (copy / "base/artifacts/model").resolve()

    edit(run / ADAPTER, base_model_name_or_path=str(run / "base/artifacts/model"))
    before = logits(run / ADAPTER)
    np.testing.assert_array_equal(logits(Path(shutil.move(run, tmp_path / "moved")) / ADAPTER), before)


def test_a_base_elsewhere_is_named_by_hand_or_by_an_option(rlhf: Any, run: Path, tmp_path: Path) -> None:
    before = logits(run / ADAPTER)
    base = str(shutil.move(run / "base/artifacts/model", tmp_path / "there"))
    prompt = ("--prompt", "a b", "--max_completion_length", "1")
    ended = rlhf("generate", str(run / ADAPTER), *prompt)
    assert ended.code == 2
    assert str(run / ADAPTER / "adapter_config.json") in ended.message
    assert "--base" in ended.message
    assert rlhf("generate", str(run / ADAPTER), "--base", base, *prompt).code == 0
    assert rlhf("export", str(run / ADAPTER), str(tmp_path / "out"), "--base", base, "--merge").code == 0
    np.testing.assert_allclose(logits(tmp_path / "out"), before, atol=1e-5)
    edit(run / ADAPTER, base_model_name_or_path=base)
    np.testing.assert_array_equal(logits(run / ADAPTER), before)
    assert artifacts.open_artifact(run / ADAPTER).name == "model"


def test_any_other_change_of_the_file_is_still_damage(run: Path) -> None:
    edit(run / ADAPTER, lora_alpha=17)
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        load_model(run / ADAPTER)


def test_another_base_in_the_place_of_the_right_one_is_refused(tiny: ModuleType, run: Path) -> None:
    other = tiny.make_model(seed=2)
    artifacts.save_model(stage(run / "base"), "model", "language_model", other)
    with pytest.raises(
        InputError, match=r"adapter_config\.json: its base model.*is not the model the adapter"
    ):
        load_model(run / ADAPTER)


def test_a_reward_models_adapters_score_after_a_move(rlhf: Any, run: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="its reward head is new"):
        model = adapted(run / "base/artifacts/model", "score")
    contract = ScoringContract.of(model.tokenizer, max_length=64).to_dict() | {"base": base_identity(model)}
    artifacts.save_model(stage(run / "rm"), "model", "reward_model", model, contract=contract)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": " b"}\n')
    first = rlhf("score", str(run / "rm/artifacts/model"), str(tmp_path / "rows.jsonl"))
    moved = Path(shutil.move(run, tmp_path / "moved"))
    assert rlhf("score", str(moved / "rm/artifacts/model"), str(tmp_path / "rows.jsonl")).out == first.out
    base = str(shutil.move(moved / "base/artifacts/model", tmp_path / "there"))
    rm = str(moved / "rm/artifacts/model")
    assert rlhf("score", rm, str(tmp_path / "rows.jsonl"), "--base", base).out == first.out
