"""docs/how-to/many_devices.md, Check before renting: names, columns and commands are those of the program."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import pytest
from rlhf_topologies import check, interpreters
from rlhf_topologies.chips import CHIPS, USABLE, parse

from rlhf_core import runtime
from tests.shared import documents

PAGE = documents.REPOSITORY / "docs/how-to/many_devices.md"
TEXT = PAGE.read_text(encoding="utf-8").partition("\n## Check before renting\n")[2].partition("\n## ")[0]


def test_every_name_is_read_and_every_chip_is_named() -> None:
    rows = TEXT.partition("### Names of devices")[2].partition("### ")[0]
    names = re.findall(r"`(\w+:[\dx]+)`", rows)
    assert len(names) == 6
    assert all(parse(name).name == name for name in names)
    assert set(CHIPS) == {name.partition(":")[0] for name in re.findall(r"`([a-z]\d\w+(?::[\dx]+)?)`", rows)}


def test_columns_are_explained() -> None:
    explained = re.findall(r"^\| ([\w ]+) \| ", TEXT.partition("| column |")[2], re.MULTILINE)
    assert explained == list(check.COLUMNS[1:])
    assert f"{USABLE:.0%}".replace("%", " %") in TEXT


def test_the_error_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLHF_GPU_PYTHON", raising=False)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path))
    with pytest.raises(interpreters.InputError) as error:
        interpreters.find(parse("h100:8"))
    (shown,) = (text for language, text in documents.blocks(PAGE) if "--on h100:8: XLA's" in text)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    said = str(error.value).replace(str(runtime.cache_root()), "~/.cache/rlhf")
    said = said.replace(python, "python3.11").replace(jax.__version__, "0.10.2")
    assert shown.split() == said.split()


def test_the_table_is_that_of_the_program() -> None:
    """It is a real output; its heading is what is printed now."""
    (heading,) = re.findall(r"^program +per update.*$", TEXT, re.MULTILINE)
    assert re.split(r" {2,}", heading) == list(check.COLUMNS)
