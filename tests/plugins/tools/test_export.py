"""`rlhf export`: models and adapters in the layouts of Hugging Face and PEFT."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_core import artifacts, load_model
from rlhf_core.errors import InputError

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


def test_a_head_of_its_own(rlhf: Any, tiny: ModuleType, tmp_path: Path) -> None:
    """An engine started with the copy has a head to be given; the model is the same."""
    tiny.make_model(tie_word_embeddings=True, scale=4).save(tmp_path / "tied")
    assert rlhf("export", str(tmp_path / "tied"), str(tmp_path / "untied"), "--untied").code == 0
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    np.testing.assert_array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    tied, untied = (load_model(tmp_path / name) for name in ("tied", "untied"))
    np.testing.assert_allclose(untied.logits(IDS, MASK), tied.logits(IDS, MASK), atol=1e-5)


@pytest.mark.parametrize("there", [False, True], ids=["a new directory", "an empty one"])
def test_a_full_disk_leaves_nothing_and_the_same_command_works_later(
    rlhf: Any, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    tiny.make_model().save(tmp_path / "model")
    out = tmp_path / "out"
    if there:
        out.mkdir()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        ended = rlhf("export", str(tmp_path / "model"), str(out))
    assert ended.code == 1
    assert (
        f"the model {tmp_path / 'model'} could not be written to {out}: no space left on the disk ("
        in ended.message
    )
    assert "No partial file is left; fix this and rerun the same command." in ended.message
    assert "goes on" not in ended.message
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        ["model", *(path.name for path in (tmp_path / "model").iterdir())]
    )
    assert rlhf("export", str(tmp_path / "model"), str(out)).code == 0
    assert load_model(out).logits(IDS, MASK).shape[1] == 4


def test_scoring_refuses_the_adapter_of_a_language_model(rlhf: Any, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": " b"}\n')
    ended = rlhf("score", str(adapter), str(tmp_path / "rows.jsonl"))
    assert ended.code == 2
    assert "without a reward head" in ended.message


@pytest.fixture
def reward_adapter(adapter: Path, tmp_path: Path) -> Path:
    """Open a language model's adapter as a reward model and save it again, as a reward stage does."""
    with pytest.warns(UserWarning, match="its reward head is new"):
        load_model(adapter, head="score", seed=3).save(tmp_path / "rm")
    return tmp_path / "rm"


@pytest.mark.parametrize("options", [[], ["--merge"]])
@pytest.mark.parametrize("mislabelled", [False, True])
def test_the_head_of_a_reward_adapter_is_exported(
    rlhf: Any, reward_adapter: Path, tmp_path: Path, options: list[str], mislabelled: bool
) -> None:
    scores = load_model(reward_adapter, head="score").scores(IDS, MASK)
    file = reward_adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    with pytest.raises(InputError, match="a reward model's adapter: load it with head='score'"):
        load_model(reward_adapter)
    if mislabelled:
        file.write_text(json.dumps(config | {"task_type": "CAUSAL_LM", "modules_to_save": None}))
    ended = rlhf("export", str(reward_adapter), str(tmp_path / "out"), *options)
    assert ended.code == 0
    assert "a reward model" in ended.out
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the head is there: none is drawn
        again = load_model(tmp_path / "out", head="score")
    np.testing.assert_allclose(again.scores(IDS, MASK), scores, atol=1e-6)


def test_a_reward_model_keeps_its_head_and_it_is_said_what_is_left_out(
    rlhf: Any, tiny: ModuleType, tmp_path: Path
) -> None:
    model = tiny.make_model("score")
    model.save(tmp_path / "rm")
    described = {"format": artifacts.FORMAT, "name": "model", "kind": "reward_model", "files": {}}
    artifacts.write_manifest(tmp_path / "rm", described)
    tensors = load_file(tmp_path / "rm" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "rm" / "model.safetensors", metadata={"format": "pt"})
    ended = rlhf("export", str(tmp_path / "rm"), str(tmp_path / "out"))
    assert ended.out.endswith(": a reward model; left out: rlhf_artifact.json, lm_head.weight\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_model(tmp_path / "out", head="score")
    np.testing.assert_array_equal(again.scores(IDS, MASK), model.scores(IDS, MASK))


def test_an_adapter_on_a_model_of_the_hubs_cache_names_it_as_the_hub_does(
    tiny: ModuleType, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--some-owner--base-1b" / "snapshots" / "0123abc"
    tiny.make_model().save(snapshot)
    adapted = load_model(snapshot).with_lora(rank=2, targets="q_proj").adapter
    assert adapted is not None
    assert adapted["base_model_name_or_path"] == "some-owner/base-1b"
