"""`rlhf new`: a package of each kind installs, is listed, is clean and passes its tests; mistakes are reported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rlhf_testing import new

from rlhf_core.errors import InputError
from rlhf_core.plugins import empty_host, load
from tests.shared import packages

LIST = "from rlhf_core.cli import main; import sys; sys.argv = ['rlhf', 'plugins', '--json']; main()"
EXAMPLES = ("rlhf-spo",)
ASKED: dict[str, tuple[list[tuple[str, str]], str | None]] = {
    **{kind: ([(kind, f"my-{kind}")], None) for kind in new.TEMPLATES},
    "trainer-pairs": ([("trainer", "calibrate")], "pairs"),
    "two": ([("reward", "tidy"), ("advantage", "level")], None),
    "two-requirements": ([("dpo_loss", "held"), ("divergence", "skew")], None),
}
"""{directory of a package: (its components, --data)}."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a new package of every kind into one directory."""
    directory = tmp_path_factory.mktemp("new")
    for name, (components, data) in ASKED.items():
        new.write(components, directory / name, load().registry, data=data)
    return directory


@pytest.fixture(scope="module")
def installed(sources: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install them together with two of the repository's examples; return the directory."""
    work, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    examples = [repository / "examples/plugins" / name for name in EXAMPLES]
    found: Path = packages.install([*sorted(sources.iterdir()), *examples], work, target)
    return found


@pytest.fixture(scope="module")
def listed(installed: Path) -> Mapping[str, Any]:
    return {plugin["name"]: plugin for plugin in json.loads(packages.python(installed, "-c", LIST))}


@pytest.mark.long
def test_scaffolds_and_examples_are_listed(listed: Mapping[str, Any]) -> None:
    for components, _ in ASKED.values():
        plugin = listed[components[0][1]]
        assert (plugin["distribution"], plugin["state"]) == (f"rlhf-{components[0][1]}", "loaded")
        assert plugin["components"] == {
            new.TEMPLATES[kind.replace("_", "-")].kind: [name.replace("-", "_")] for kind, name in components
        }
    assert listed["spo"]["components"] == {"policy loss": ["spo"], "reward": ["finished_sentences"]}


@pytest.mark.long
def test_their_tests_pass(sources: Path, installed: Path, repository: Path) -> None:
    tests = [sources / kind / "tests" for kind in ASKED]
    tests += [repository / "examples/plugins" / name / "tests" for name in EXAMPLES]
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir")
    said = packages.python(installed, *options, str(sources), *map(str, tests), JAX_NUM_CPU_DEVICES="8")
    assert " passed" in said


def test_scaffolds_pass_ruff(sources: Path, repository: Path) -> None:
    """Check them with this repository's rules; each package sorts its own imports."""
    ruff = [sys.executable, "-m", "ruff"]
    rules = "E,F,W,I,UP,B,C4,SIM,RUF,PT,RET,PIE,N"
    for command in (
        ["check", "--no-cache", "--select", rules, "--ignore", "RUF001,RUF002,RUF003"],
        ["format", "--no-cache", "--check"],
    ):
        done = subprocess.run([*ruff, *command, str(sources)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_command(rlhf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = rlhf("new", "policy_loss", "rlhf-steady")
    assert (done.code, done.message) == (0, "")
    assert "the policy loss 'steady' is in rlhf-steady/src/rlhf_steady/__init__.py" in done.out
    assert "pip install -e 'rlhf-steady[test]'" in done.out
    text = (tmp_path / "rlhf-steady/pyproject.toml").read_text()
    assert 'dependencies = ["rlhf-core>=0.1,<0.2"]' in text
    assert '[project.entry-points."rlhf.policy_loss"]\nsteady = "rlhf_steady:SteadyLoss"\n' in text
    assert "class SteadyLoss:" in (tmp_path / "rlhf-steady/src/rlhf_steady/__init__.py").read_text()
    assert "{{" not in "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    (tmp_path / "empty").mkdir()
    assert rlhf("new", "reward", "short", "--dir", "empty").code == 0
    assert (tmp_path / "empty/pyproject.toml").is_file()
    done = rlhf("new", "reward", "tidy", "advantage", "level")
    assert "the advantage 'level' is in rlhf-tidy/src/rlhf_tidy/level.py" in done.out
    assert {path.name for path in (tmp_path / "rlhf-tidy/tests").iterdir()} == {
        "test_tidy.py",
        "test_level.py",
    }
    readme = (tmp_path / "rlhf-tidy/README.md").read_text()
    assert "the reward `tidy` and the advantage `level`" in readme
    stage = tomllib.loads(readme.partition("```toml\n")[2].partition("```")[0])["stage"]
    assert [(each["rewards"][0]["name"], each["advantage"]["name"]) for each in stage] == [("tidy", "level")]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("texts", "next-token training"),
        ("pairs", "context.pairs("),
        ("prompts", "open_collector("),
    ],
)
def test_a_trainer_reads_its_data(
    data: str, says: str, rlhf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rlhf("new", "trainer", "mine", "--data", data, "reward", "tidy")
    assert "the trainer 'mine' is in rlhf-mine/src/rlhf_mine/mine.py" in done.out
    assert says in (tmp_path / "rlhf-mine/src/rlhf_mine/mine.py").read_text()
    assert f"{data}()" in (tmp_path / "rlhf-mine/tests/test_mine.py").read_text()


def test_what_declares_the_kind_is_required(tmp_path: Path) -> None:
    new.write([("reward", "tidy"), ("dpo loss", "held")], tmp_path / "both", load().registry)
    text = (tmp_path / "both/pyproject.toml").read_text()
    assert 'dependencies = ["rlhf-core>=0.1,<0.2", "rlhf-dpo>=0.1,<0.2"]' in text
    with pytest.raises(InputError, match="'dpo-loss' is a kind of rlhf-dpo; type: pip install rlhf-dpo"):
        new.write([("dpo-loss", "held")], tmp_path / "held", empty_host().registry)


def test_a_mistake_leaves_nothing(rlhf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rlhf("new", "reward", "short", "advantage", "short").code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "pin"), [("0.1.0", ">=0.1,<0.2"), ("0.12.3", ">=0.12,<0.13"), ("1.4.2", ">=1.4,<2")]
)
def test_the_pin(version: str, pin: str) -> None:
    assert new.pin(version) == pin
