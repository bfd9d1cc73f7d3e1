"""`rlhf export`: models and adapters in the layouts of Hugging Face and PEFT."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlhf_core import load_model

IDS, MASK = np.array([[3, 9, 4, 7]]), np.ones((1, 4), int)


@pytest.fixture
def adapter(tiny: ModuleType, tmp_path: Path) -> Path:
    tiny.make_model().save(tmp_path / "base")
    model = load_model(tmp_path / "base").with_lora(rank=2, targets="q_proj")
    part = model.params["layers"]["self_attn"]["q_proj"]["adapter"]
    part["lora_b"] = part["lora_b"] + 0.5
    model.save(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_alone_and_merged(rlhf: Any, adapter: Path, tmp_path: Path) -> None:
    ended = rlhf("export", str(adapter), str(tmp_path / "alone"))
    assert ended.code == 0
    assert (
        ended.out.strip() == f"{tmp_path / 'alone'}: an adapter of {(tmp_path / 'base').resolve()}, for PEFT"
    )
    assert rlhf("export", str(adapter), str(tmp_path / "whole"), "--merge").code == 0
    logits = [
        np.asarray(load_model(path).logits(IDS, MASK))
        for path in (adapter, tmp_path / "alone", tmp_path / "whole")
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_allclose(logits[2], logits[0], atol=1e-5)
    assert not (tmp_path / "whole" / "adapter_config.json").exists()
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    assert (tmp_path / "whole" / "tokenizer.json").is_file()


def test_a_reward_model_keeps_its_head(rlhf: Any, tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.make_model("score")
    model.save(tmp_path / "rm")
    assert rlhf("export", str(tmp_path / "rm"), str(tmp_path / "out")).out.endswith(": a reward model\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_model(tmp_path / "out", head="score")
    np.testing.assert_array_equal(again.scores(IDS, MASK), model.scores(IDS, MASK))


def test_what_cannot_be_exported(rlhf: Any, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make_model().save(tmp_path / "model")
    for arguments, message in [
        ((str(tmp_path / "model"), str(tmp_path / "model")), "exists already: give a new directory"),
        ((str(tmp_path / "model"), str(tmp_path / "out"), "--merge"), "has no adapters to merge"),
        ((str(tmp_path / "modl"), str(tmp_path / "out")), "no such directory"),
    ]:
        ended = rlhf("export", *arguments)
        assert ended.code == 2
        assert message in ended.message
    assert not (tmp_path / "out").exists()


def test_scoring_refuses_the_adapter_of_a_language_model(rlhf: Any, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": " b"}\n')
    ended = rlhf("score", str(adapter), str(tmp_path / "rows.jsonl"))
    assert ended.code == 2
    assert "without a reward head" in ended.message
