"""`rlhf new`: write a package for components, small examples that install and pass their tests.

Each kind has a folder of templates with placeholders such as `{{name}}`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
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
OBJECTS = {"reward": "{name}", "trainer": "trainer", "sampling-trainer": "trainer"}
"""{kind on the command line: what its entry point names, where that is not the class}."""
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
class WrittenPackage:
    """A new package: its directory, and of each component "the reward 'concise'" and the file that it is in."""

    directory: Path
    components: Mapping[str, Path]


def write(asked: Sequence[tuple[str, str]], directory: Path | None, registry: Registry) -> WrittenPackage:
    """Write a package for components into `directory`, by default ./rlhf-NAME, of the first one's name.

    asked: (kind, name) of each component. One alone is the package's `__init__.py`; several are modules of it.
    registry: the installed plugins' names, which are taken. Raises InputError, with every problem, for an unknown
    kind, a name that a package, class or component cannot have, and a directory that is not empty.
    """
    pairs = [
        (
            kind.replace("_", "-").replace(" ", "-"),
            name.removeprefix("rlhf-").removeprefix("rlhf_"),
        )
        for kind, name in asked
    ]
    first = pairs[0][1]
    directory = Path(_distribution(first)) if directory is None else directory
    problems = [problem for kind, words in pairs for problem in _wrong(kind, words, registry)]
    modules = [words.replace("-", "_") for _, words in pairs]
    problems += [f"two components are called '{name}'" for name in modules if modules.count(name) > 1]
    if _installed(_distribution(first)):
        problems.append(f"a distribution {_distribution(first)} is installed already; choose another name")
    problems += _occupied(directory)
    if problems:
        raise InputError(*(f"rlhf new: {problem}" for problem in dict.fromkeys(problems)))
    package = f"rlhf_{modules[0]}"
    source = directory / "src" / package
    several = len(pairs) > 1
    texts: dict[Path, str] = {}
    components: dict[str, Path] = {}
    filled = [
        _values(kind, words, f"{package}.{module}" if several else package)
        for (kind, words), module in zip(pairs, modules, strict=True)
    ]
    for (kind, _), values in zip(pairs, filled, strict=True):
        file = source / (f"{values['name']}.py" if several else "__init__.py")
        texts[file] = _filled(f"{kind}/component.py.txt", values)
        texts[directory / "tests" / f"test_{values['name']}.py"] = _filled(f"{kind}/test.py.txt", values)
        components[f"the {values['kind']} '{values['name']}'"] = file
    if several:
        texts[source / "__init__.py"] = f'"""A package for rlhf-core: {_listed(filled)}."""\n'
    of_package = {
        "distribution": _distribution(first),
        "package": package,
        "points": _points(filled),
        "pin": pin(__version__),
        "components": _listed(filled),
        "place": f"[src/{package}](src/{package})"
        if several
        else f"[src/{package}/\\_\\_init\\_\\_.py](src/{package}/__init__.py)",
        "checked": " and ".join(dict.fromkeys(each["checked"] for each in filled)),
        "usage": "\n```\n\n```toml\n".join(
            _filled(f"{kind}/usage.txt", values).rstrip()
            for (kind, _), values in zip(pairs, filled, strict=True)
        ),
    }
    texts[directory / "pyproject.toml"] = _filled("pyproject.toml.txt", of_package)
    texts[directory / "README.md"] = _filled("README.md.txt", of_package)

    def write(place: Path) -> None:
        for path, text in texts.items():
            write_atomic(place / path.relative_to(directory), text)

    fill_directory(directory, write, f"the package {directory.name}")
    return WrittenPackage(directory, components)


def _points(components: Sequence[Mapping[str, str]]) -> str:
    """Return the entry points of a package's components, a table for each kind."""
    tables: dict[str, list[str]] = {}
    for each in components:
        group = each["kind"].replace(" ", "_")
        tables.setdefault(group, []).append(f'{each["name"]} = "{each["module"]}:{each["object"]}"')
    return "\n\n".join(
        "\n".join((f'[project.entry-points."rlhf.{group}"]', *points)) for group, points in tables.items()
    )


def _listed(components: Sequence[Mapping[str, str]]) -> str:
    """Return "the reward `concise`, the advantage `steady` and the policy loss `soft`"."""
    named = [f"the {each['kind']} `{each['name']}`" for each in components]
    return " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)


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


def _distribution(words: str) -> str:
    return f"rlhf-{words.replace('_', '-')}"


def _values(kind: str, words: str, module: str) -> dict[str, str]:
    """Return the values of a component's placeholders. module: that it is in."""
    name = words.replace("-", "_")
    camel = "".join(word.capitalize() for word in name.split("_"))
    class_name = camel.removesuffix(SUFFIXES[kind]) + SUFFIXES[kind]
    return {
        "kind": KINDS[kind].name,
        "name": name,
        "module": module,
        "class": class_name,
        "object": OBJECTS.get(kind, class_name).format(name=name),
        "checked": CHECKED.get(kind, "what every trainer relies on"),
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
