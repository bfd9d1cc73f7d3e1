"""Untrusted tokenizer files: none of their code is run, and any defect raises a single InputError."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_core import cli
from rlhf_core.errors import InputError
from rlhf_core.models import load_model
from rlhf_core.tokenizer import load_tokenizer
from tests.shared import chat_cases as chat

TURNS = [chat.user("a b"), chat.assistant("b")]
CODE = "from pathlib import Path\nPath({marker!r}).touch()\nclass Evil: pass\nclass EvilConfig: pass\n"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize("model_type", ["llama", "evil"])
@pytest.mark.parametrize("fast", [True, False])
def test_code_beside_a_tokenizer_is_never_run(
    fast: bool, model_type: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, marker = tmp_path / "model", tmp_path / "was_run"
    model = tiny.make_model("lm")
    model.save(path)
    (path / "evil.py").write_text(CODE.format(marker=str(marker)))
    named = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.EvilConfig"}
    edit(path / "tokenizer_config.json", lambda c: {**c, "tokenizer_class": "Evil", "auto_map": named})
    edit(path / "config.json", lambda c: {**c, "model_type": model_type, "auto_map": named})
    if not fast:
        (path / "tokenizer.json").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 100))
    rows = str(tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}]))
    out = ["--dir", str(tmp_path / "run"), "--max_training_steps", "1"]
    doors = (
        ["data", rows, "--tokenizer", str(path)],
        ["data", rows, "--model", str(path)],
        ["generate", str(path), "--prompt", "a", "--max_completion_length", "1"],
        ["score", str(path), rows],
        ["export", str(path), str(tmp_path / "out")],
        ["train", "sft", "--model", str(path), "--train_data", rows, *out],
        ["train", "grpo", "--model", str(path), "--train_data", rows, "--rewards", '["length"]', *out],
    )
    wrong = model_type == "evil"
    for door in doors if wrong else doors[:2]:
        result = CliRunner().invoke(cli.app, door, input="y\n" * 100)
        assert isinstance(result.exception, InputError | SystemExit | None), (door, result.exception)
    for load in (load_tokenizer, load_model):
        with contextlib.suppress(InputError):
            load(path)
    assert not marker.exists()


@pytest.mark.parametrize("command", ["score", "generate"])
@pytest.mark.parametrize("column", ["prompt", "completion", "id"])
def test_an_unpaired_surrogate_in_any_column_is_reported_before_anything_is_computed(
    column: str, command: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, cut = tmp_path / "rows.jsonl", '"a\\ud83d"'
    fine = {"prompt": '"a"', "completion": '"b"', "id": "1"}
    rows.write_text("".join(
        "{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}\n"
        for row in (fine, {**fine, column: cut})
    ))  # fmt: skip
    tiny.make_model("score" if command == "score" else "lm").save(tmp_path / "model")
    monkeypatch.setattr("rlhf_core.models.loading.load_model", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(InputError, match=rf"row 2: '{column}' is not valid Unicode: .*; remove it"):
        CliRunner().invoke(cli.app, [command, str(tmp_path / "model"), str(rows)], catch_exceptions=False)
