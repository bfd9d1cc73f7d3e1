"""Control characters in names, metrics and completions are escaped, never sent to a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.table import Table

from rlhf_core.loggers.console import Pace, PlainView, TqdmView
from rlhf_core.runtime.terminal import SafeConsole, escape_control, indented_list
from tests.torture.terminal import on_terminal

HOSTILE = "a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x7ff\ud800g\u061c"
SAFE = r"a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x7ff\ud800g\u061c"


def test_tables_and_lists_show_them() -> None:
    assert escape_control(HOSTILE) == SAFE
    assert escape_control("tabs\tand\nlines, ä 漢字 🙂 ✓") == "tabs\tand\nlines, ä 漢字 🙂 ✓"
    table = Table("name")
    table.add_row(HOSTILE)
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, color_system="truecolor", width=120).print(table)
    assert SAFE in out.getvalue()
    for forbidden in ("\x1b]0", "\x07", "\x9b", "\u202e", "\x7f"):
        assert forbidden not in out.getvalue()
    assert "\x1b" not in indented_list(HOSTILE, [HOSTILE])


@pytest.mark.parametrize("view", [PlainView, TqdmView])
def test_views_show_them(view: type[PlainView], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = view(HOSTILE, Pace(tmp_path / "plan.json", ()))
    shown.start(HOSTILE)
    shown.saved(HOSTILE, "kind", HOSTILE)
    err = capsys.readouterr().err
    assert SAFE in err
    assert "\x1b" not in err
    assert "\x9b" not in err


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
    _, seen = on_terminal(*command, cwd=tmp_path)
    assert rb"\x1b" in seen
    for forbidden in (b"\x1b]0", b"\x07", b"\x1b[2J"):
        assert forbidden not in seen
