"""Tests import what packages name; a module that is not public has a reason in tests/private_imports.toml."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

from tests.walk.source import APART, files, private_imports

TESTS = Path(__file__).parents[1]
MOST = 219


def test_every_private_module_that_is_imported_has_a_reason_and_they_become_no_more() -> None:
    tests = [file for file in TESTS.rglob("*.py") if file.relative_to(TESTS).parts[0] not in APART]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in tests]
    modules = files(TESTS.parent)
    found = Counter(module for tree in trees for module in private_imports(tree, modules))
    reasons = tomllib.loads((TESTS / "private_imports.toml").read_text(encoding="utf-8"))
    assert sorted(found) == sorted(module for named in reasons.values() for module in named)
    assert found.total() <= MOST
