"""Every door that opens a model knows the families of plugins, installed or given as a file."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import plugins
from rlhf_core.errors import InputError
from rlhf_core.models import fresh_model, load_model
from tests.shared import commands

PLUGIN = """
from rlhf_core import MODEL, hookimpl
from rlhf_core.models import decoder_family
from rlhf_core.models.families import ARCHITECTURES

@hookimpl
def rlhf_register(registry):
    registry.add(MODEL, "strange", decoder_family({"strange": ARCHITECTURES["llama"]}))
"""
OPENERS = ("load_model", "fresh_model", "check_model", "find_family", "complete_table", "definition_of")


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "strange_family.py"
    file.write_text(PLUGIN)
    return file


@pytest.fixture
def made(tmp_path: Path, plugin: Path, tiny: Any) -> Path:
    """The directory of a model of the stranger's family."""
    registry = plugins.load(files=[plugin]).registry
    table = {**tiny.SIZES, "model_type": "strange", "architectures": ["StrangeForCausalLM"]}
    fresh_model(table, "lm", tokenizer=tiny.make_tokenizer(), registry=registry).save(tmp_path / "lm")
    return tmp_path / "lm"


def test_a_command_opens_a_family_given_as_a_file(made: Path, plugin: Path, tmp_path: Path) -> None:
    typed = ["export", made, tmp_path / "exported"]
    commands.rlhf(*typed, "--plugin", plugin)
    assert isinstance(commands.rlhf(*typed, fails=True).exception, InputError)


@pytest.fixture
def installed(made: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stranger's family as an installed distribution has it, beside models that were made before."""
    assert made
    info = plugin.parent / "strange-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlhf]\nstrange = {plugin.stem}\n")
    monkeypatch.syspath_prepend(plugin.parent)
    monkeypatch.setenv(plugins.DISABLE, " ")  # asks for them again
    yield
    sys.modules.pop(plugin.stem, None)


@pytest.mark.usefixtures("installed")
def test_python_opens_installed_families_without_a_registry(made: Path) -> None:
    assert load_model(made) is not None


def test_no_door_opens_a_model_without_its_registry(repository: Path) -> None:
    files = [*(repository / "rlhf_core").rglob("*.py"), *(repository / "plugins").glob("*/rlhf_*/**/*.py")]
    without = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            scorer = name == "load" and getattr(getattr(called, "value", None), "id", "") == "Scorer"
            if name not in OPENERS and not scorer:
                continue
            if name == "check_model" and file.is_relative_to(repository / "plugins/testing/rlhf_testing"):
                continue  # the kit of that name
            passed = ast.unparse(node)
            if "registry" not in passed:
                without.append(f"{file.relative_to(repository)}:{node.lineno}: {passed}")
    assert not without, json.dumps(without, indent=1)
