"""The page on judges: its script is one, and the run that it describes counts what failed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.shared import documents

PAGE = documents.REPOSITORY / "docs/how-to/judge.md"
PORT = "9100"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[str]:
    """Run the page's judge on a free port."""
    script = next(
        text for _, text in documents.blocks(PAGE) if documents.named(text) == "judge_server.py"
    ).replace(
        f'ThreadingHTTPServer(("127.0.0.1", {PORT}), Judge).serve_forever()',
        'server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)\n'
        "    print(server.server_address[1], flush=True)\n"
        "    server.serve_forever()",
    )
    (tmp_path / "server.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "server.py"], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_the_page_can_be_followed(
    port: str, tmp_path: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-page")
    documents.on_one_device(monkeypatch)
    tiny.make_model().save(tmp_path / "MODEL")
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(8))

    def edit(text: str) -> str:
        return str(documents.few_updates(text)).replace(PORT, port)

    documents.follow(PAGE, edit=edit)
    run = tmp_path / "runs/judge"
    rows = [json.loads(line) for line in (run / "policy/metrics.jsonl").read_text().splitlines()]
    text = PAGE.read_text(encoding="utf-8")
    named = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `rewards/judge/")}
    assert len(rows) == 2
    assert all(named <= set(row) for row in rows)
    answers = list((run / "policy/answers").glob("??/*.json"))
    assert len(answers) >= 8
    assert "student" in json.loads(answers[0].read_text())["request"]["messages"][0]["content"]
    for path in run.rglob("*"):
        assert not path.is_file() or b"sk-of-the-page" not in path.read_bytes()
