"""Facts about the repository itself: what a clone may and may not hold."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ALONE = {"verifiers"}
"""Installed by itself, since it brings sixty packages; the environment of the tests has it not."""
PLUGINS = sorted({path.parent.name for path in REPOSITORY.glob("plugins/*/pyproject.toml")} - ALONE)
DISTRIBUTIONS = (".", *(f"plugins/{name}" for name in PLUGINS))
SKIPPED = {".git", ".venv", ".cache", "runs", "wandb", "dist", "build", "__pycache__", "data"}
ADDRESS = re.compile(
    r"(?:https?|file)://[^\s\"'>)]*(?:simple|pypi|wheels)[^\s\"'>)]*|--(?:extra-)?index-url|--find-links"
)
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:work|farm|home|root|Users|opt|mnt)/\w+")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b")


@cache
def files(repository: Path) -> list[Path]:
    """What is, or would be, in version control; of an exported tree, everything that is not generated."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.split("\0") if name and (path := repository / name).is_file()]
    found = (path for path in repository.rglob("*") if path.is_file())
    return [
        p
        for p in found
        if not any(x in SKIPPED or x.startswith(".") for x in p.relative_to(repository).parts[:-1])
    ]


def texts(repository: Path) -> dict[str, str]:
    out = {}
    for path in files(repository):
        try:
            out[path.relative_to(repository).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return out


def this_file() -> str:
    return "tests/docs/" + Path(__file__).name


@pytest.mark.parametrize("pattern", [ADDRESS, MACHINE_PATH, UNFINISHED], ids=["index", "path", "marker"])
def test_no_address_of_a_package_index_no_path_of_a_machine_and_no_unfinished_work(
    pattern: re.Pattern[str], repository: Path
) -> None:
    found = {
        name: pattern.findall(text)
        for name, text in texts(repository).items()
        if name != this_file() and pattern.search(text)
    }
    assert not found


def test_no_large_file(repository: Path) -> None:
    large = {str(path): path.stat().st_size for path in files(repository) if path.stat().st_size > 2**20}
    assert not large


def test_constraints_are_names_and_versions(repository: Path) -> None:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9][\w.-]*==[\w.]+", line) for line in lines)
    assert lines == sorted(lines, key=str.lower)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    for directory in DISTRIBUTIONS:
        for requirement in shared_metadata(repository / directory)["dependencies"]:
            name = re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")
            assert name in pinned or name.startswith("rlhf-"), (
                f"{directory}: {name} has no version in constraints.txt"
            )


def test_the_tools_of_the_makefile_are_pinned(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    tools = re.search(r"^TOOLS := (.*)$", makefile, re.MULTILINE)
    assert tools is not None
    constraints = (repository / "constraints.txt").read_text(encoding="utf-8")
    assert all(re.search(rf"^{tool}==", constraints, re.MULTILINE) for tool in tools[1].split())


def shared_metadata(directory: Path) -> dict[str, Any]:
    """What a distribution gives the hook that completes its metadata, hatch_build.py."""
    tool = tomllib.loads((directory / "pyproject.toml").read_text())["tool"]
    hook: dict[str, Any] = tool["hatch"]["metadata"]["hooks"]["custom"]
    return hook


def test_one_version_everywhere(repository: Path) -> None:
    import rlhf_core

    for directory in DISTRIBUTIONS:
        project = tomllib.loads((repository / directory / "pyproject.toml").read_text())["project"]
        assert version(project["name"]) == rlhf_core.__version__, "installed from an older state: make env"
    changelog = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\d\S*)", changelog, re.MULTILINE)[1] == rlhf_core.__version__  # type: ignore[index]


def test_the_suite_is_all_of_it(repository: Path) -> None:
    """In the Makefile, which builds and installs them, and in rlhf-suite, which depends on them."""
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    assert set(re.search(r"^PLUGINS := (.*)$", makefile, re.M)[1].split()) == {
        f"plugins/{name}" for name in PLUGINS
    }  # type: ignore[index]
    suite = shared_metadata(repository / "plugins/suite")
    needed = {each.partition("[")[0] for each in suite["dependencies"]}
    assert {*needed, "rlhf-suite"} == {"rlhf-core", *(f"rlhf-{name}" for name in PLUGINS)}
    # People expect wandb to work with the suite.
    brought = {each for each in suite["dependencies"] if "[" in each}
    assert brought == {"rlhf-trackers[wandb]"}
    optional = {
        f"rlhf-{name}[{extra}]"
        for name in set(PLUGINS) - {"suite"}
        for extra in shared_metadata(repository / "plugins" / name).get("optional-dependencies", ())
    }
    assert set(suite["optional-dependencies"]["all"]) == optional - brought
    assert len({(repository / "plugins" / name / "hatch_build.py").read_bytes() for name in PLUGINS}) == 1


LIBRARIES = {"http"}
"""Distributions that others import; they register nothing."""


@pytest.mark.parametrize("name", [*PLUGINS, *ALONE])
def test_a_plugin_imports_no_other_but_libraries_that_it_names(name: str, repository: Path) -> None:
    needed = shared_metadata(repository / "plugins" / name)["dependencies"]
    for file in (repository / "plugins" / name).rglob("*.py"):
        found = set(re.findall(r"^\s*(?:from|import) rlhf_(\w+)", file.read_text(encoding="utf-8"), re.M))
        others = found - {"core", name}
        assert others <= LIBRARIES, file
        assert {f"rlhf-{other}" for other in others} <= set(needed), file


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/tutorial/first_run.md"]
)
def test_commands_in_documents_exist(repository: Path, document: str) -> None:
    text = (repository / document).read_text(encoding="utf-8")
    targets = set(
        re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    named = set(re.findall(r"(?:`|^|\$ )make ([a-z]+)", text, re.MULTILINE))
    assert named <= targets


def test_the_main_module_is_kept_where_scripts_are_forgotten(
    request: pytest.FixtureRequest, repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a clone below /tmp, pytest's `__main__` and the installed packages are below a place of scripts."""
    conftest = request.config.pluginmanager.get_plugin(str(repository / "tests" / "conftest.py"))
    monkeypatch.setattr(conftest, "PLACES_OF_SCRIPTS", (sys.prefix, str(tmp_path)))
    for name, directory in (("__main__", Path(sys.prefix, "lib", "pytest")), ("judge", tmp_path)):
        module = ModuleType(name)
        module.__file__ = str(directory / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
    conftest.forget_modules_of_scripts()
    assert "__main__" in sys.modules
    assert "judge" not in sys.modules
