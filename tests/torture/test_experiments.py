"""Every experiment can be loaded, and every mutant planted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.__main__ import EXPERIMENTS, load, names
from tests.torture.experiments.mutants import planted
from tests.torture.planted import MUTANTS, Mutant


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_a_share_of_a_budget(name: str) -> None:
    experiment = load(name)
    assert experiment.SHARE > 0
    assert callable(experiment.run)
    assert experiment.__doc__


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant: Mutant) -> None:
    text = planted(mutant)  # raises where what it replaces is not there
    if mutant.file.endswith(".py"):
        compile(text, mutant.file, "exec")
    assert names([mutant.experiment])


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_experiments_go_by_number_and_name() -> None:
    assert names(["t3", "saves"]) == ["crash_states", "saves"]
    with pytest.raises(ValueError, match="T1 to T17"):
        names(["T18"])


@pytest.mark.long
def test_a_run_and_its_engine_are_killed(repository: Path) -> None:
    """Conversations with an engine, a rollout ahead: afterwards the run has the bits of one that was not killed."""
    command = [sys.executable, "-m", "tests.torture", "T15", "--case", "adapters turns 1"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures in 1 cases" in done.stdout
