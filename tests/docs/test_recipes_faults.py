"""tests/recipes/faults.py: every fault can be planted where it says, and names recipes and tests that there are."""

import subprocess
import sys
from pathlib import Path


def test_every_fault_can_be_planted(repository: Path) -> None:
    command = [sys.executable, str(repository / "tests/recipes/plant.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
