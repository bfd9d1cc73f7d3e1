"""What tests of distillation share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def teacher(tiny: ModuleType) -> Any:
    """A model of another width than the students', with the tokenizer of all."""
    return tiny.make_model(seed=5, scale=3.0, hidden_size=24, num_hidden_layers=1)


@pytest.fixture(scope="session")
def teacher_path(teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    teacher.save(path)
    return path
