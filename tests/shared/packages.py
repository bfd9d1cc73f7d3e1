"""Packages installed for real, into a directory of their own, and programs that find them there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def install(sources: Sequence[Path], work: Path, target: Path) -> Path:
    """`target` with the packages of the source directories, as pip installs them, without a network."""
    copies = [shutil.copytree(source, work / source.name) for source in sources]  # building leaves files
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--no-index", "--target", str(target), *map(str, copies)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


def python(installed: Path, *arguments: str, fails: bool = False, **environment: str) -> str:
    """What `python ARGUMENTS` prints where the packages in `installed` are found."""
    paths = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + (done.stderr if fails else "")
