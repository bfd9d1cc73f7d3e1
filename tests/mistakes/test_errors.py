"""Error lines name the place in the component's own code, wherever it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core import errors
from rlhf_core.plugins import load_file

CALLS = "def call(function):\n    return function()\n"
FAILS = "def fail():\n    raise OSError('no disk')\n"


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (["site/component/a.py", "site/requests/b.py"], "site/component/a.py line 2"),
        (["mine/a.py", "site/requests/b.py"], "mine/a.py line 2"),
        (["site/pluggy/b.py", "site/component/a.py"], "site/component/a.py line 2"),
        (["site/component/a.py", "site/component/b.py"], "site/component/b.py line 2"),
        (["site/component/a.py", "json/b.py"], "site/component/a.py line 2"),
        (["core/a.py", "site/jax/b.py"], None),
    ],
)
def test_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], line: str | None
) -> None:
    outer, inner = (tmp_path / file for file in files)
    for path, text in ((outer, CALLS), (inner, FAILS)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    # As with a Python of the system, libraries are inside of the directory of the standard library.
    paths = {"stdlib": str(tmp_path), "purelib": str(tmp_path / "site")}
    if files[0].startswith("mine"):
        paths["stdlib"] = "/nowhere"
    monkeypatch.setattr(errors.sysconfig, "get_path", paths.__getitem__)
    with pytest.raises(OSError, match="no disk") as caught:
        load_file(outer).call(load_file(inner).fail)
    error = caught.value
    here = (__file__, str(tmp_path / "core"))
    expected = "raised OSError: no disk" + (f" ({tmp_path / line})" if line else "")
    assert errors.error_line(error, *here) == expected
