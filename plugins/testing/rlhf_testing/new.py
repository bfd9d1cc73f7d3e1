"""`rlhf new`: write a package for components, small examples that install and pass their tests.

A component has a folder of templates with placeholders such as `{{name}}`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from rlhf_core import __version__
from rlhf_core.contracts import KINDS
from rlhf_core.errors import InputError, suggest
from rlhf_core.plugins.registry import Registry
from rlhf_core.runtime.files import fill_directory, write_atomic


@dataclass(frozen=True)
class Template:
    """A component that can be written, by its word on the command line.

    kind: the registry's name of its kind. suffix: of class names. entry: what its entry point names.
    kit: what the kit for its kind checks; None: there is no kit. needs: the distribution that declares the kind, where
    it is not core.
    """

    kind: str
    suffix: str = ""
    entry: str = "{class}"
    kit: str | None = "what every trainer relies on"
    needs: str | None = None


OF_TRAINERS = Template("trainer", entry="trainer", kit="what a pipeline relies on")
TEMPLATES: Mapping[str, Template] = {
    "policy-loss": Template("policy loss", "Loss"),
    "pairwise-loss": Template("pairwise loss", "Loss"),
    "dpo-loss": Template("dpo loss", "Loss", kit=None, needs="rlhf-dpo"),
    "divergence": Template("divergence", "Divergence", kit=None, needs="rlhf-distill"),
    "advantage": Template("advantage", "Advantage"),
    "reward": Template("reward", entry="{name}"),
    "environment": Template(
        "environment", "Environment", kit="that its episodes end, can be repeated and share nothing"
    ),
    "trainer": OF_TRAINERS,
    "sampling-trainer": OF_TRAINERS,
    "logger": Template("logger", "Logger", kit="that it handles every event of a stage"),
}
DATA = {"texts": "trainer", "pairs": "pairs-trainer", "prompts": "sampling-trainer"}
"""{`--data` of a trainer: its folder of templates}; the folders of others are called as their words are."""
NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


class Scaffold(NamedTuple):
    """A component to write: its word, such as "policy-loss", its name with hyphens, and its folder of templates."""

    word: str
    name: str
    folder: str

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class WrittenPackage:
    """A new package: its directory, and of each component "the reward 'concise'" and the file that it is in."""

    directory: Path
    components: Mapping[str, Path]


def write(
    asked: Sequence[tuple[str, str]], directory: Path | None, registry: Registry, *, data: str | None = None
) -> WrittenPackage:
    """Write a package for components into `directory`, by default ./rlhf-NAME, of the first one's name.

    asked: (kind, name) of each component. One alone is the package's `__init__.py`; several are modules of it.
    registry: the installed plugins' names, which are taken. data: what its trainers train on, one of `DATA`.
    Raises InputError, with every problem, for an unknown kind or data, a name that a package, class or component cannot
    have, and a directory that is not empty.
    """
    components = [_component(kind, name, data) for kind, name in asked]
    first = components[0].name
    directory = Path(_distribution(first)) if directory is None else directory
    problems = [*_package_problems(components, registry, data), *_occupied(directory)]
    if problems:
        raise InputError(*(f"rlhf new: {problem}" for problem in dict.fromkeys(problems)))
    package = f"rlhf_{components[0].module}"
    source = directory / "src" / package
    several = len(components) > 1
    texts: dict[Path, str] = {}
    written: dict[str, Path] = {}
    filled: list[dict[str, str]] = []
    usage: dict[str, str] = {}
    for each in components:
        if several:
            file = source / f"{each.module}.py"
            module = f"{package}.{each.module}"
        else:
            file = source / "__init__.py"
            module = package
        values = _values(each, module)
        filled.append(values)
        texts[file] = _filled(f"{each.folder}/component.py.txt", values)
        texts[directory / "tests" / f"test_{each.module}.py"] = _filled(f"{each.folder}/test.py.txt", values)
        usage[values["name"]] = _filled(f"{each.folder}/usage.txt", values)
        written[f"the {values['kind']} '{values['name']}'"] = file
    link = f"[src/{package}/\\_\\_init\\_\\_.py](src/{package}/__init__.py)"
    if several:
        texts[source / "__init__.py"] = f'"""A package for rlhf-core: {_listed(filled)}."""\n'
        link = f"[src/{package}](src/{package})"
    versions = pin(__version__)
    needed = dict.fromkeys(["rlhf-core", *(TEMPLATES[each.word].needs for each in components)])
    of_package = {
        "distribution": _distribution(first),
        "package": package,
        "points": _points(filled),
        "pin": versions,
        "dependencies": ", ".join(f'"{name}{versions}"' for name in needed if name),
        "components": _listed(filled),
        "place": link,
        "tested": _tested(components),
        "usage": _stages(usage),
    }
    texts[directory / "pyproject.toml"] = _filled("pyproject.toml.txt", of_package)
    texts[directory / "README.md"] = _filled("README.md.txt", of_package)

    def write_texts(place: Path) -> None:
        for path, text in texts.items():
            write_atomic(place / path.relative_to(directory), text)

    fill_directory(directory, write_texts, f"the package {directory.name}")
    return WrittenPackage(directory, written)


def _component(kind: str, name: str, data: str | None) -> Scaffold:
    """Return what words of the command line ask for; underscores, spaces and `rlhf-` in front are typed easily."""
    word = kind.replace("_", "-").replace(" ", "-")
    folder = DATA.get(data or "", word) if word == "trainer" else word
    return Scaffold(word, name.removeprefix("rlhf-").removeprefix("rlhf_"), folder)


def _points(components: Sequence[Mapping[str, str]]) -> str:
    """Return the entry points of a package's components, a table for each kind."""
    tables: dict[str, list[str]] = {}
    for each in components:
        group = each["kind"].replace(" ", "_")
        tables.setdefault(group, []).append(f'{each["name"]} = "{each["module"]}:{each["object"]}"')
    return "\n\n".join(
        "\n".join((f'[project.entry-points."rlhf.{group}"]', *points)) for group, points in tables.items()
    )


def _stages(usage: Mapping[str, str]) -> str:
    """Join the stages that use components, {name: TOML}: a trainer has one stage, with all that is for it."""
    stages: dict[str, dict[str, str]] = {}
    for name, text in usage.items():
        lines = {line.partition(" = ")[0]: line for line in text.splitlines()}
        stage = stages.setdefault(lines["trainer"], {})
        for key, line in lines.items():
            if key not in stage or f'"{name}"' in line:
                stage[key] = line
    return "\n```\n\n```toml\n".join("\n".join(stage.values()) for stage in stages.values())


def _listed(components: Sequence[Mapping[str, str]]) -> str:
    """Return "the reward `concise`, the advantage `steady` and the policy loss `soft`"."""
    named = [f"the {each['kind']} `{each['name']}`" for each in components]
    return " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)


def _tested(components: Sequence[Scaffold]) -> str:
    """Return what the tests of a package do, as a README says it after "The tests"."""
    kits = dict.fromkeys(TEMPLATES[each.word].kit for each in components)
    checked = [kit for kit in kits if kit is not None]
    if not checked:
        return "compare with known values, and try that gradients stay finite"
    return (
        "compare with known values, and call the kit of `rlhf_core.testing` for the kind, which checks\n"
        + " and ".join(checked)
    )


def _package_problems(components: Sequence[Scaffold], registry: Registry, data: str | None) -> Iterator[str]:
    """Say what stands against a package of these components, wherever it is written."""
    for each in components:
        yield from _wrong(each, registry)
    modules = [each.module for each in components]
    for name in modules:
        if modules.count(name) > 1:
            yield f"two components are called '{name}'"
    if data is not None:
        yield from _wrong_data(data, components)
    distribution = _distribution(components[0].name)
    if _installed(distribution):
        yield f"a distribution {distribution} is installed already; choose another name"


def _wrong(component: Scaffold, registry: Registry) -> list[str]:
    word, words, name = component.word, component.name, component.module
    problems = []
    if word not in TEMPLATES:
        problems.append(f"no kind '{word}'.{suggest(word, TEMPLATES)} There are: {', '.join(TEMPLATES)}")
    if not NAME.fullmatch(words):
        problems.append(
            f"'{words}' cannot be a name: use lower-case letters, digits and single hyphens, starting with a letter, "
            "such as my-loss"
        )
        return problems
    if keyword.iskeyword(name):
        problems.append(f"'{name}' is a keyword of Python; choose another")
    if word in TEMPLATES:
        template = TEMPLATES[word]
        kinds = {kind.name: kind for kind in (*KINDS, *registry.kinds())}
        kind = kinds.get(template.kind)
        if kind is None:
            problems.append(f"'{word}' is a kind of {template.needs}; type: pip install {template.needs}")
        elif name in registry.names(kind):
            owner = registry.owner(kind, name)
            problems.append(f"{kind.name} '{name}' exists already, in {owner}; choose another name")
    return problems


def _wrong_data(data: str, components: Sequence[Scaffold]) -> list[str]:
    problems = []
    if data not in DATA:
        problems.append(f"--data: no data '{data}'.{suggest(data, DATA)} There are: {', '.join(DATA)}")
    if all(each.word != "trainer" for each in components):
        problems.append("--data says what a trainer trains on: write it with trainer NAME")
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


def _values(component: Scaffold, module: str) -> dict[str, str]:
    """Return the values of a component's placeholders. module: that it is in."""
    template, name = TEMPLATES[component.word], component.module
    camel = "".join(word.capitalize() for word in name.split("_"))
    class_name = camel.removesuffix(template.suffix) + template.suffix
    return {
        "kind": template.kind,
        "name": name,
        "module": module,
        "class": class_name,
        "object": template.entry.format(**{"name": name, "class": class_name}),
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
