"""Plant a fault of durability or of cleaning up in a copy of the code: the experiment named with it must find it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.torture import shim
from tests.torture.experiment import Case, Trial
from tests.torture.planted import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[3]
SHARE = 3.0
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def run(trial: Trial) -> None:
    shim.require()
    names = list(BY_NAME)
    trial.random("order").shuffle(names)
    trial.each(names, judge, seconds=900)


def judge(case: Case) -> None:
    mutant = BY_NAME[case.name]
    copy(case.directory / "tree", mutant)
    cases = ["--case", mutant.case] if mutant.case else ["--budget", str(mutant.minutes)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.torture", mutant.experiment, "--seed", "0", *cases],
        cwd=case.directory / "tree",
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    found = ended.returncode == 1 and " failures in " in ended.stdout
    case.require(
        found, f"{mutant.about}: {mutant.experiment} did not find it\n{ended.stdout}{ended.stderr[-2000:]}"
    )
    case.count("found")


def copy(target: Path, mutant: Mutant) -> None:
    """Copy the tree's code, with the mutant planted. Raises ValueError where what it replaces does not occur once."""
    for name in code_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((ROOT / name).read_bytes())
    (target / mutant.file).write_text(planted(mutant), encoding="utf-8")


def code_files() -> list[str]:
    """List what a run and the experiments need, relative to the repository."""
    found = [
        path
        for folder in ("rlhf_core", "plugins", "tests", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return [path.relative_to(ROOT).as_posix() for path in [*found, ROOT / "pyproject.toml"]]


def planted(mutant: Mutant) -> str:
    """Return a file's text with the mutant in it. Raises ValueError where what it replaces does not occur once."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: what it replaces occurs {count} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)
