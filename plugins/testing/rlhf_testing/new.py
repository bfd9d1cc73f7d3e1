"""`rlhf new`: write a package for a component, a small example that installs and passes its tests.

Each kind has a folder of templates with placeholders such as `{{name}}`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

from rlhf_core import __version__, contracts
from rlhf_core.contracts import Kind
from rlhf_core.errors import InputError, suggest
from rlhf_core.plugins.registry import Registry
from rlhf_core.runtime.files import fill_directory, write_atomic

SUFFIXES = {
    "policy-loss": "Loss",
    "pairwise-loss": "Loss",
    "advantage": "Advantage",
    "reward": "",
    "environment": "Environment",
    "trainer": "",
    "sampling-trainer": "",
    "logger": "Logger",
}
"""{kind on the command line: suffix of its class names}."""
CHECKED = {
    "trainer": "what a pipeline relies on",
    "sampling-trainer": "what a pipeline relies on",
    "environment": "that its episodes end, can be repeated and share nothing",
    "logger": "that it handles every event of a stage",
}
"""{kind on the command line: what its kit checks}, where it is not what every trainer relies on."""
KINDS: Mapping[str, Kind[object]] = {
    name: getattr(contracts, name.removeprefix("sampling-").replace("-", "_").upper()) for name in SUFFIXES
}
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@dataclass(frozen=True)
class Written:
    """A new package: its directory, the file with the component, its kind on the command line, and its name."""

    directory: Path
    module: Path
    kind: str
    name: str


def write(kind: str, name: str, directory: Path | None, registry: Registry) -> Written:
    """Write the package rlhf-NAME for a component of that kind into `directory`, by default ./rlhf-NAME.

    registry: the installed plugins' names, which are taken. Raises InputError, with every problem, for an unknown
    kind, a name that a package, class or component cannot have, and a directory that is not empty.
    """
    kind = kind.replace("_", "-").replace(" ", "-")
    words = name.removeprefix("rlhf-").removeprefix("rlhf_")
    directory = Path(f"rlhf-{words.replace('_', '-')}") if directory is None else directory
    problems = [*_wrong(kind, words, registry), *_occupied(directory)]
    if problems:
        raise InputError(*(f"rlhf new: {problem}" for problem in problems))
    values = _values(kind, words)
    module = directory / "src" / values["module"] / "__init__.py"
    test = directory / "tests" / f"test_{values['name']}.py"
    usage = _filled(f"{kind}/usage.txt", values).rstrip()
    texts = {
        directory / "pyproject.toml": _filled("pyproject.toml.txt", values),
        directory / "README.md": _filled("README.md.txt", values | {"usage": usage}),
        module: _filled(f"{kind}/component.py.txt", values),
        test: _filled(f"{kind}/test.py.txt", values),
    }

    def write(place: Path) -> None:
        for path, text in texts.items():
            write_atomic(place / path.relative_to(directory), text)

    fill_directory(directory, write, f"the package {directory.name}")
    return Written(directory, module, kind, values["name"])


def _wrong(kind: str, words: str, registry: Registry) -> list[str]:
    problems = []
    if kind not in KINDS:
        problems.append(f"no kind '{kind}'.{suggest(kind, KINDS)} There are: {', '.join(KINDS)}")
    name = words.replace("-", "_")
    if not NAME.fullmatch(words):
        problems.append(
            f"'{words}' cannot be a name: use lower-case letters, digits and single hyphens, starting with a letter, "
            "such as my-loss"
        )
        return problems
    if keyword.iskeyword(name):
        problems.append(f"'{name}' is a keyword of Python; choose another")
    if kind in KINDS and name in registry.names(KINDS[kind]):
        owner = registry.owner(KINDS[kind], name)
        problems.append(f"{KINDS[kind].name} '{name}' exists already, in {owner}; choose another name")
    elif _installed(f"rlhf-{words.replace('_', '-')}"):
        problems.append(
            f"a distribution rlhf-{words.replace('_', '-')} is installed already; choose another name"
        )
    return problems


def _occupied(directory: Path) -> list[str]:
    if directory.is_dir() and not any(directory.iterdir()):
        return []
    if directory.exists():
        return [f"{directory} exists already; give another with --dir, or delete it"]
    return []


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _values(kind: str, words: str) -> dict[str, str]:
    """Return the values of the placeholders."""
    name = words.replace("-", "_")
    camel = "".join(word.capitalize() for word in name.split("_"))
    return {
        "kind": KINDS[kind].name,
        "name": name,
        "distribution": f"rlhf-{words.replace('_', '-')}",
        "module": f"rlhf_{name}",
        "class": camel.removesuffix(SUFFIXES[kind]) + SUFFIXES[kind],
        "checked": CHECKED.get(kind, "what every trainer relies on"),
        "pin": pin(__version__),
    }


def pin(version: str) -> str:
    """Return the range of compatible versions: below 1.0 one minor version, from then on one major version."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def _filled(template: str, values: Mapping[str, str]) -> str:
    text = files("rlhf_testing").joinpath("templates", *template.split("/")).read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value)
    return text
