"""docs/how-to/hugging_face.md is followed; what it shows of PyTorch, benchmarks/interop runs where PyTorch is."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors import safe_open

from rlhf_core import load_model
from rlhf_core.tokenizer import load_tokenizer, tokenizer_hash
from tests.shared import documents

PAGE = documents.REPOSITORY / "docs/how-to/hugging_face.md"
IN_TORCH = "in_torch.py"


@pytest.mark.long
def test_what_is_exported_is_what_was_trained_and_what_the_page_says(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    documents.on_one_device(monkeypatch)
    tiny.make_model().save(tmp_path / "base")
    tiny.write_rows(tmp_path / "texts.jsonl", tiny.texts(8))
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(4))
    documents.follow(PAGE)
    ids, mask = np.array([[3, 9, 4, 1]]), np.ones((1, 4), int)
    for name, artifact in (
        ("reward", "rm"),
        ("adapter", "policy"),
        ("merged", "policy"),
        ("merged_too", "policy"),
    ):
        head = "score" if name == "reward" else "lm"
        trained = load_model(tmp_path / f"runs/hugging_face/{artifact}/artifacts/model", head)
        out = load_model(tmp_path / name, head)
        one, two = ((m.scores if head == "score" else m.logits)(ids, mask) for m in (trained, out))
        np.testing.assert_allclose(two, one, atol=1e-5)
        assert not (tmp_path / name / "rlhf_artifact.json").exists()

    def tensors(name: str) -> dict[str, tuple[list[int], str]]:
        with safe_open(tmp_path / name, "numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (it is no mapping)
            return {key: (each.get_shape(), each.get_dtype()) for key, each in slices.items()}

    base, merged, reward = (tensors(f"{name}/model.safetensors") for name in ("base", "merged", "reward"))
    assert merged == base
    assert set(reward) - set(base) == {"score.weight"}
    configs = {
        name: json.loads((tmp_path / name / "config.json").read_text())
        for name in ("base", "merged", "reward")
    }
    assert configs["merged"] == configs["base"]
    assert configs["reward"]["architectures"] == ["LlamaForSequenceClassification"]
    assert configs["reward"]["pad_token_id"] == load_model(tmp_path / "base").tokenizer.pad_token_id
    adapter = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert Path(adapter["base_model_name_or_path"]) == (tmp_path / "base").resolve()
    reader = load_tokenizer(tmp_path / "reward")  # it carries what the reward model was trained with
    assert reader.get_vocab() == load_tokenizer(tmp_path / "base").get_vocab()
    assert (reader.truncation_side, (tmp_path / "reward/README.md").is_file()) == ("left", True)
    one, two = (tokenizer_hash(load_tokenizer(tmp_path / name)) for name in ("base", "merged"))
    assert one == two


def test_what_it_shows_of_pytorch_is_run_by_the_benchmark() -> None:
    (text,) = [text for _, text in documents.blocks(PAGE) if documents.named(text) == IN_TORCH]
    opened = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    exported = {
        line.split()[3]
        for _, block in documents.blocks(PAGE)
        for line in documents.commands(block)
        if "export" in line
    }
    assert exported <= opened
    assert IN_TORCH in (documents.REPOSITORY / "benchmarks/interop/page.py").read_text(encoding="utf-8")
