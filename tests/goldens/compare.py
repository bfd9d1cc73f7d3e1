"""Run the golden pipelines with the code of two commits on this machine, and compare bits.

    python -m tests.goldens.compare COMMIT           the working tree against a commit
    python -m tests.goldens.compare COMMIT sft grpo  these pipelines alone

The pipelines and inputs are the working tree's for both. Each commit has an environment made from its own pyproject
files and constraints.txt, kept under their hash in .cache/goldens; where the hash is the working tree's, it is .venv.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.goldens.pipelines import GOLDENS
from tests.goldens.run import ROOT, differences, run

CACHE = ROOT / ".cache/goldens"
SHOWN = 5


def tree_of(commit: str) -> Path:
    """Check a commit out, once, and return where."""
    name = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if not name:
        raise SystemExit(f"BASE={commit}: git knows no such commit")
    path = CACHE / "trees" / name[:12]
    if not path.is_dir():
        unfinished = path.with_suffix(".tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", name], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=unfinished, input=archive, check=True)
        unfinished.rename(path)
    return path


def requirements(tree: Path) -> str:
    """Return a hash of what a tree's environment is made from."""
    files = [
        tree / "constraints.txt",
        tree / "pyproject.toml",
        *sorted(tree.glob("plugins/*/pyproject.toml")),
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(tree)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def python_of(tree: Path) -> str:
    """Return the interpreter of a tree's environment, which is made where there is none."""
    key = requirements(tree)
    if key == requirements(ROOT):
        return sys.executable
    environment = CACHE / "environments" / key
    if not (environment / "installed").exists():
        print(f"Installing the environment of {tree.name}, which takes some minutes.", flush=True)
        subprocess.run(["make", "env", f"VENV={environment}"], cwd=tree, check=True)
    return str(environment / "bin/python")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make goldens", description=__doc__.partition("\n")[0])
    parser.add_argument("base", metavar="COMMIT")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(GOLDENS))
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in GOLDENS]
    if unknown:
        raise SystemExit(f"no golden pipeline {', '.join(unknown)}; there are {', '.join(GOLDENS)}")
    tree = tree_of(options.base)
    pythons = {tree: python_of(tree), ROOT: sys.executable}
    differ = []
    for name in options.names or GOLDENS:
        began = time.monotonic()
        found = []
        for root, python in pythons.items():
            # In the same directory for both: what is printed is wrapped by the length of its path.
            with tempfile.TemporaryDirectory(prefix="golden-") as directory:
                found.append(run(name, Path(directory) / "golden", root, python))
        wrong = list(differences(*found))
        differ += [name] if wrong else []
        print(f"{name:10} {time.monotonic() - began:4.0f} s  {'differs' if wrong else 'equal'}", flush=True)
        for line in wrong[:SHOWN]:
            print(f"    {line}", flush=True)
        if len(wrong) > SHOWN:
            print(f"    and {len(wrong) - SHOWN} more", flush=True)
    raise SystemExit(1 if differ else 0)


if __name__ == "__main__":
    main()
