"""What SECURITY.md says: modes of files, no code of models, no pickle in what is read, a page that asks for nothing."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_report.frozen import frozen

REPOSITORY = Path(__file__).parents[2]
PRIVATE = {"pipeline.resolved.toml", "stage.json"}
PICKLES = {
    "rlhf_core/workers/child.py",
    "rlhf_core/workers/pickling.py",
    "rlhf_core/workers/pool.py",
    "rlhf_core/environments/calls.py",
}
"""Modules that unpickle what a worker or its parent has sent."""
PIPELINE = """
dir = "run"
[[stage]]
name = "base"
trainer = "sft"
train_data = "corpus.jsonl"
total_batch_size = 2
max_training_steps = 2
save_steps = 1
log_steps = 1
max_sequence_length = 16

[stage.model]
model_type = "llama"
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 1
intermediate_size = 8
tokenizer = "tokenizer"
"""


@pytest.fixture(scope="module")
def nodes() -> list[tuple[str, ast.Call | ast.keyword]]:
    """(file, node) of every call and every keyword argument in the code."""
    paths = [*(REPOSITORY / "rlhf_core").rglob("*.py"), *(REPOSITORY / "plugins").rglob("*.py")]
    return [
        (path.relative_to(REPOSITORY).as_posix(), node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call | ast.keyword)
    ]


@pytest.mark.parametrize("mask", [0o000, pytest.param(0o077, marks=pytest.mark.long)])
def test_files_of_a_run_have_modes_by_the_umask_but_configurations_are_private(
    tiny: ModuleType,
    rlhf: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mask: int,
) -> None:
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "corpus.jsonl").write_text((json.dumps({"prompt": "a b", "completion": " c d"}) + "\n") * 4)
    (tmp_path / "p.toml").write_text(PIPELINE)
    monkeypatch.chdir(tmp_path)
    before = os.umask(mask)
    try:
        assert rlhf("run", "p.toml").code == rlhf("report", "run").code == 0
    finally:
        os.umask(before)
    paths = list((tmp_path / "run").rglob("*"))
    assert {path.name for path in paths} >= PRIVATE | {"events.jsonl", "report.html", "model.safetensors"}
    for path in paths:
        most = 0o777 if path.is_dir() else 0o600 if path.name in PRIVATE else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == most & ~mask, path


def test_no_code_of_a_model_is_trusted(nodes: list[tuple[str, ast.Call | ast.keyword]]) -> None:
    trusted = [
        f"{name} line {node.value.lineno}"
        for name, node in nodes
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert trusted == []
    assert '"*.py"' not in (REPOSITORY / "rlhf_core/models/loading.py").read_text()


def test_nothing_is_unpickled_but_what_workers_and_their_parents_send(
    nodes: list[tuple[str, ast.Call | ast.keyword]],
) -> None:
    names = set()
    for name, node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pickle.load", "pickle.loads"):
            names.add(name)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant), name
            assert node.value.value is False, name
    assert names <= PICKLES


def test_the_page_forbids_requests_and_holds_none() -> None:
    page = frozen({"api/runs": {"runs": []}}, "run")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "http" not in policy[1]
    assert not re.search(r"""<[^>]*\s(?:src|href|action)\s*=\s*["']?(?!#)[\w/:{]""", page)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", page)
