"""Every fault of tests/recipes/faults.py and every mutant of mutants.toml can be planted where it says."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("script", ["plant.py", "mutants.py"])
def test_everything_can_be_planted(repository: Path, script: str) -> None:
    command = [sys.executable, str(repository / "tests/recipes" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
