"""Commands that installed distributions add to `rlhf`, with made-up distributions."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.metadata import EntryPoints, distributions
from pathlib import Path
from typing import Any

import pytest

from tests.shared import site as sites

COMMANDS = """
import typer

def greet(name: str) -> None:
    "Greet someone."
    print(f"hello, {name}")

adapters = typer.Typer(help="Adapters.")

@adapters.command()
def pull() -> None:
    "Pull."
    print("pulled")

@adapters.command()
def push() -> None:
    "Push."
"""


def install(site: Path, distribution: str, points: str) -> None:
    sites.install(site, distribution, f"[rlhf.commands]\n{points}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path; what is installed elsewhere adds no command."""
    monkeypatch.syspath_prepend(tmp_path)

    def entry_points() -> EntryPoints:
        found = [point for each in distributions(path=[str(tmp_path)]) for point in each.entry_points]
        suite = importlib.metadata.entry_points()
        others = [point for group in suite.groups for point in suite.select(group=group)]
        return EntryPoints([*found, *(point for point in others if point.group != "rlhf.commands")])

    monkeypatch.setattr("rlhf_core.runtime.distributions.entry_points", entry_points)
    sites.forget()
    monkeypatch.delitem(sys.modules, "added_commands", raising=False)
    (tmp_path / "added_commands.py").write_text(COMMANDS)
    return tmp_path


def test_functions_and_groups_become_commands(site: Path, rlhf: Any) -> None:
    install(site, "acme-tools", "greet = added_commands:greet\nadapters = added_commands:adapters")
    assert rlhf("greet", "Mia").out == "hello, Mia\n"
    assert rlhf("adapters", "pull").out == "pulled\n"
    listed = rlhf("--help").out
    assert "  greet     Greet someone.\n" in listed
    assert "  adapters  Adapters.\n" in listed
    missing = rlhf("greet")
    assert missing.code == 2
    assert "Missing argument" in missing.message
    assert "Did you mean 'greet'" in rlhf("gret").message
    assert '"command": [\n        "adapters",\n        "greet"' in rlhf("plugins", "--json").out


def test_a_command_that_is_not_installed_says_what_to_install(site: Path, rlhf: Any) -> None:
    for command, package in {
        "report": "rlhf-report",
        "compare": "rlhf-report",
        "new": "rlhf-testing",
    }.items():
        refused = rlhf(command, "x")
        assert (refused.code, refused.message) == (
            2,
            f"rlhf {command}: not installed; type: pip install {package}",
        )


def test_a_command_that_does_not_load_harms_no_other(site: Path, rlhf: Any) -> None:
    install(site, "acme-tools", "greet = added_commands:greet\nbad = added_commands:missing")
    listed = rlhf("--help")
    assert listed.code == 0
    assert "rlhf bad: acme-tools 1.0 failed to load" in listed.warned
    assert "greet" in listed.out
    assert "  bad" not in listed.out
    assert rlhf("bad").code == 2
    assert rlhf("greet", "Mia").code == 0


def test_two_distributions_with_one_command(site: Path, rlhf: Any) -> None:
    for name in ("acme-tools", "other-tools"):
        install(site, name, "greet = added_commands:greet\nrun = added_commands:greet")
    refused = rlhf("greet", "Mia")
    assert refused.code == 2
    assert "acme-tools 1.0 and other-tools 1.0 both have it; uninstall one" in refused.message
    assert "finished stages are skipped" in rlhf("run", "--help").out, "core's own commands stay"
