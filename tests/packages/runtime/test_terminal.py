"""Standard output: its width, and wrapping between words."""

from __future__ import annotations

import os
import sys

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
