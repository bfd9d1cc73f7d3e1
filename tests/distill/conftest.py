"""rlhf-distill is found as a plugin, also by an environment that was made before it was there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

METADATA = "Metadata-Version: 2.4\nName: rlhf-distill\nVersion: 0.1.0\nRequires-Dist: rlhf-core<0.2,>=0.1\n"


@pytest.fixture(scope="session", autouse=True)
def _installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    try:
        distribution("rlhf-distill")
    except PackageNotFoundError:
        place = tmp_path_factory.mktemp("installed")
        about = place / "rlhf_distill-0.1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(METADATA)
        (about / "entry_points.txt").write_text("[rlhf]\ndistill = rlhf_distill\n")
        patch = pytest.MonkeyPatch()
        added = [str(place), str(repository / "plugins" / "distill")]
        patch.setattr(sys, "path", [*sys.path, *added])
        patch.setenv("PYTHONPATH", os.pathsep.join([*added, os.environ.get("PYTHONPATH", "")]))
        yield
        patch.undo()
    else:
        yield


@pytest.fixture(scope="session")
def teacher(tiny: ModuleType) -> Any:
    """A model of another width than the students', with the tokenizer of all."""
    return tiny.make_model(seed=5, scale=3.0, hidden_size=24, num_hidden_layers=1)


@pytest.fixture(scope="session")
def teacher_path(teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    teacher.save(path)
    return path
