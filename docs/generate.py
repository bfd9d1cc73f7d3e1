"""Write the pages of docs/reference that are made of the code: configuration, components, commands, hooks and Python.

    python docs/generate.py

A test compares the files with what this writes. Descriptions stand in the code, beside the field, option or hook that
they describe. Only what this repository registers is listed, whatever else is installed.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import python_page
import rlhf_dpo
import typer
from as_markdown import default, joined, page, paragraphs, table
from pydantic.fields import FieldInfo

from rlhf_core import cli, contracts, plugins
from rlhf_core.config import Component, Options, TrainerConfig, fields
from rlhf_core.contracts import TRAINER, Kind
from rlhf_core.plugins import Host, hooks
from rlhf_core.plugins.component import Entry

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/reference"
NOTE = "*Written by [generate.py](../generate.py) from the code; change it there.*"
KINDS = {
    "trainer": "what a stage's `trainer` names: a `Trainer`, its configuration and a function that runs it",
    "pairwise loss": "a value a pair, from the scores of chosen and rejected reply: `loss` of a reward stage",
    "dpo loss": "a value a pair, from log-probabilities of chosen and rejected completion: `loss` of a DPO stage",
    "policy loss": "a value a token, from log-probabilities and advantages: `loss` of a GRPO stage",
    "advantage": "advantages of groups of completions, from their rewards: `advantage` of a GRPO stage",
    "attention": "attention of rows with themselves: `attention` of any stage",
    "sampler": "what draws completions: `sampler` of a GRPO stage",
    "reward": "a number a completion: an entry of `rewards` of a GRPO stage",
    "model": "a family of models, found by the `model_type` of config.json: a `ModelFamily`",
    "dataset": "rows by index: the `name` in a table `train_data` or `eval_data`",
    "logger": "an object with hooks, which listens while its stage runs: an entry of `logger`",
    "optimizer": "a transformation of gradients for a learning rate: `optimizer` of any stage",
}
HOW_TO_READ = """A field that may be `none` is left out of a file to be none; on a command line it is `--set
STAGE.FIELD=none`. A *table* is written `{ key = value }`, or as a table of its own, `[stage.lora]`.
Where a component is asked for, its name will do, `loss = "dapo"`, or a table with its options,
`loss = { name = "dapo", epsilon_high = 0.28 }`: see [components](components.md). A misspelt field
is an error that says which was meant."""

PYTHON = """What trainers, losses, rewards and loggers are written with. Shapes are in brackets: [rows, time];
log-probabilities are in nats."""


def pages() -> dict[str, str]:
    """{file name: text}. Raises SystemExit where a distribution of this repository is not installed."""
    host = plugins.load()
    return {
        "config.md": config_page(host),
        "components.md": components_page(host),
        "commands.md": commands_page(),
        "hooks.md": hooks_page(),
        "python.md": page(["# Python", NOTE, PYTHON, *python_page.parts()]),
    }


def ours(host: Host) -> dict[str, dict[str, list[str]]]:
    """{distribution: {kind: [names]}} of this repository."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    names = [tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] for file in files]
    loaded = {info.distribution: dict(info.components) for info in host.plugins if info.state == "loaded"}
    if missing := [name for name in names if name not in loaded]:
        raise SystemExit(f"not installed, or failed to load: {', '.join(missing)}; run make env")
    return {name: loaded[name] for name in names}


# Configuration


def config_page(host: Host) -> str:
    parts = [
        "# Configuration",
        NOTE,
        "The fields of a stage, beside `name` and `trainer`. `rlhf train TRAINER --help` prints the same, and what "
        "EasyDeL and TRL call them is in [coming from](coming_from.md).",
        HOW_TO_READ,
        "## Every trainer",
        field_table(TrainerConfig, TrainerConfig.model_fields),
        *nested_tables(TrainerConfig, TrainerConfig.model_fields),
        "Other spellings: "
        + ", ".join(f"`{alias}` is `{name}`" for alias, name in TrainerConfig._aliases().items())
        + ".",
    ]
    for components in ours(host).values():
        for name in components.get("trainer", []):
            parts += trainer_section(name, host.registry.get(TRAINER, name).config)
    return page(parts)


def trainer_section(name: str, config: type[TrainerConfig]) -> Iterator[str]:
    """The fields that a trainer adds or changes; the flat names; what it does not use."""
    shared = {row.name: row for row in fields(TrainerConfig)}
    own = [
        row.name for row in fields(config) if row.name in config.model_fields and shared.get(row.name) != row
    ]
    yield f"## {name}"
    yield (
        f"{paragraphs(config)[0]} Beside the fields of every trainer:"
        if own
        else (f"{paragraphs(config)[0]} The fields are those of every trainer.")
    )
    if own:
        yield field_table(config, own)
        yield from nested_tables(config, own)
    if flat := config._flat():
        short = [f"`{key}` is `{field}.{inner}`" for key, (field, inner, *_) in flat.items()]
        yield "Short names: " + ", ".join(short) + "."
    for field, instead in config.UNUSED.items():
        yield f"`{field}` has no effect here: {instead}."


def field_table(config: type[Options], names: Iterable[str]) -> str:
    docs = {row.name: row for row in fields(config)}
    rows = []
    for name in names:
        field, doc = config.model_fields[name], docs[name]
        known = doc.type if field.is_required() is False else f"{doc.type}, required"
        rows.append((f"`{name}`", linked(known) + doc.bounds, default(doc.default), doc.description))
    return table(("field", "type", "default", "meaning"), rows)


def nested_tables(config: type[Options], names: Iterable[str]) -> Iterator[str]:
    """A table for each field that holds one, in the order of the fields."""
    for name in names:
        for inner in option_classes(config.model_fields[name]):
            component = issubclass(inner, Component)
            said = paragraphs(inner) if inner.__doc__ else []
            yield f"### {name}"
            yield " ".join([*said, "Beside the component's own options:" if component else ""])
            yield field_table(inner, [key for key in inner.model_fields if not (component and key == "name")])


def option_classes(field: FieldInfo) -> list[type[Options]]:
    """The tables that a field may hold: subclasses of Options, of components those with keys of the trainer's."""
    found: list[type[Options]] = []
    waiting = [field.annotation]
    while waiting:
        each = waiting.pop(0)
        if inspect.isclass(each) and issubclass(each, Options) and each is not Component:
            found.append(each)
        waiting += get_args(each)
    return found


def linked(words: str) -> str:
    """The name of a kind leads to its components."""
    for name in KINDS:
        if re.fullmatch(rf"(list of )?{name}", words):
            return words.replace(name, f"[{name}](components.md#{name.replace(' ', '-')})")
    return words


# Components


def components_page(host: Host) -> str:
    found = ours(host)
    parts = [
        "# Components",
        NOTE,
        "What can be named in a pipeline, by kind, with its options. `rlhf plugins` lists what is installed. "
        "A kind is a constant of `rlhf_core`, or of the plugin that declares it; a plugin adds to it with "
        '`registry.add(POLICY_LOSS, "name", thing)`. The docstrings of `rlhf_core/contracts` and of the plugin\'s '
        "`contracts.py` say what a component of each kind is given and returns.",
    ]
    parts.append(table(("kind", "constant", "a component is"), kind_rows()))
    for kind in declared().values():
        parts.append(f"## {kind.name}")
        alike: dict[tuple[str, ...], list[str]] = {}
        for distribution, components in found.items():
            for name in components.get(kind.name, []):
                said = tuple(component(distribution, host.registry._entry(kind, name)))
                alike.setdefault(said, []).append(f"**`{name}`**")
        for (first, *rest), names in alike.items():
            parts += [f"{', '.join(names)}: {first}", *rest]
    return page(parts)


def declared() -> dict[str, Kind[Any]]:
    """{constant: kind} of the contracts, and of the plugins that have kinds of their own."""
    homes = (contracts, contracts, rlhf_dpo)
    return {name: value for home in homes for name, value in vars(home).items() if isinstance(value, Kind)}


def kind_rows() -> list[tuple[str, str, str]]:
    return [
        (f"[{kind.name}](#{kind.name.replace(' ', '-')})", f"`{constant}`", KINDS[kind.name])
        for constant, kind in declared().items()
    ]


def component(distribution: str, entry: Entry) -> Iterator[str]:
    """What it is, and its options; without its name, since several may be the same but for that."""
    if entry.kind == TRAINER:
        outputs = ", ".join(f"`{name}` ({kind})" for name, kind in entry.thing.outputs.items())
        said = f"{paragraphs(entry.thing.config)[0]} Output: {outputs}; [its fields](config.md#{entry.name})."
        yield f"{said} *{distribution}*"
        return
    said = paragraphs(entry.thing) if inspect.isroutine(entry.thing) or inspect.isclass(entry.thing) else []
    yield " ".join([said[0] if said else f"Reads `{', '.join(entry.thing.name)}`.", f"*{distribution}*"])
    yield from said[1:]
    if entry.options:
        parameters = inspect.signature(entry.thing).parameters
        rows = []
        for name, model in entry.options.items():
            (option,) = fields(model)
            given = parameters[name].default
            shown = "required" if given is inspect.Parameter.empty else default(given)
            rows.append((f"`{name}`", option.type + option.bounds, shown))
        yield table(("option", "type", "default"), rows)


# Commands and hooks


def commands_page() -> str:
    group: Any = typer.main.get_command(cli.app)
    codes = paragraphs(cli.main)[0].removeprefix("Exit codes: ").rstrip(".")
    parts = ["# Commands", NOTE, f"Exit codes: {codes}. Problems are one line each, on standard error."]
    for name, command in group.commands.items():
        arguments = [each for each in command.params if not each.opts[0].startswith("-")]
        flags = [each for each in command.params if each.opts[0].startswith("-")]
        used = [each.metavar if each.required else f"[{each.metavar}]" for each in arguments]
        parts += [
            f"## rlhf {name}",
            f"`{' '.join(['rlhf', name, *used, *(['[OPTIONS]'] if flags else [])])}`",
        ]
        parts += [joined(text) for text in command.help.split("\n\n")]
        rows = [(f"`{each.metavar}`", each.help, "") for each in arguments if each.help]
        rows += [flag_row(each) for each in flags]
        if rows:
            parts.append(table(("argument or flag", "meaning", "default"), rows))
    return page(parts)


def flag_row(flag: Any) -> tuple[str, str, str]:
    annotation = flag.type_descriptor.annotation
    (kind,) = get_args(annotation) or (annotation,)
    value = "" if flag.is_flag else f" {flag.metavar or {int: 'N', float: 'X'}.get(kind, 'TEXT')}"
    given = "" if flag.default is None or flag.is_flag else default(flag.default)
    return f"`{', '.join(flag.opts)}{value}`", flag.help or "", given


def hooks_page() -> str:
    parts = ["# Hooks", NOTE]
    text = inspect.cleandoc(hooks.__doc__ or "").split("\n\n")
    parts += [
        f"```text\n{inspect.cleandoc(each)}\n```" if each.startswith(" ") else joined(each) for each in text
    ]
    parts.append(
        "A plugin is a module, an object or a file whose functions carry `@hookimpl` from `rlhf_core`; a logger is an "
        "object with such methods."
    )
    for name, hook in vars(hooks).items():
        if name.startswith("rlhf_"):
            signature = str(inspect.signature(hook)).replace("'", "").replace(" -> None", "")
            parts += [f"## {name}", f"`{name}{signature}`", *paragraphs(hook)]
    return page(parts)


if __name__ == "__main__":
    for file, text in pages().items():
        (TARGET / file).write_text(text, encoding="utf-8")
        print(TARGET / file)
