"""Standard output: its width, wrapping between words, and control characters, which are never sent to a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from rlhf_core.runtime import terminal

WORDS = "three words here and many more that follow them " * 8


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("40", 40), (None, terminal.WIDTH)])
def test_what_is_piped(
    columns: str | None,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    table = Table(box=None)
    for name in ("a", "b"):
        table.add_column(name)
    table.add_row(WORDS, "short")
    terminal.show(table)
    lines = capsys.readouterr().out.splitlines()
    assert width - 12 <= max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


def test_lists_are_wrapped_for_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.indented_list("title", [WORDS, "last"]) == f"title\n  {WORDS}\n  last"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    title, first, second, *_, last = terminal.indented_list("title", [WORDS, "last"]).splitlines()
    assert (title, last) == ("title", "  last")
    assert first.startswith("  three words")
    assert second.startswith("    ")
    assert max(len(first), len(second)) <= 80


HOSTILE = "a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x7ff\ud800g\u061c"
SAFE = r"a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x7ff\ud800g\u061c"


def test_tables_and_lists_show_them() -> None:
    assert terminal.escape_control(HOSTILE) == SAFE
    assert terminal.escape_control("tabs\tand\nlines, ä 漢字 🙂 ✓") == "tabs\tand\nlines, ä 漢字 🙂 ✓"
    table = Table("name")
    table.add_row(HOSTILE)
    out = io.StringIO()
    terminal.SafeConsole(file=out, force_terminal=True, color_system="truecolor", width=120).print(table)
    assert SAFE in out.getvalue()
    for forbidden in ("\x1b]0", "\x07", "\x9b", "\u202e", "\x7f"):
        assert forbidden not in out.getvalue()
    assert "\x1b" not in terminal.indented_list(HOSTILE, [HOSTILE])


@pytest.mark.parametrize(
    "command",
    [["data", "pairs.jsonl"], pytest.param(["check", "pipe.toml"], marks=pytest.mark.long)],
    ids=" ".join,
)
def test_a_terminal_never_gets_the_escapes_of_a_data_file(command: list[str], tmp_path: Path) -> None:
    """Print through a real pseudo-terminal, as `rlhf check` and its errors do."""
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"\x1b]0;owned\x07column": "x"}) + "\n")
    (tmp_path / "pipe.toml").write_text(
        'dir = "run"\n[[stage]]\nname = "rm"\ntrainer = "reward\\u001b[2J"\ntrain_data = "pairs.jsonl"\n'
    )
    seen = _on_a_terminal([sys.executable, "-m", "rlhf_core.cli", *command], tmp_path)
    assert rb"\x1b" in seen
    for forbidden in (b"\x1b]0", b"\x07", b"\x1b[2J"):
        assert forbidden not in seen


def _on_a_terminal(command: list[str], directory: Path) -> bytes:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, cwd=directory, stdin=slave, stdout=slave, stderr=slave, close_fds=True
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux says EIO once the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(master)
    process.wait()
    return seen
