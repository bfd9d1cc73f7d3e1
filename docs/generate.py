"""Write what docs/reference takes from the code: fields, components with hooks, commands, Python names and models.

    python docs/generate.py

Fields are written between marks, the other pages whole; a test compares the files with what this writes. Descriptions
stand in the code, beside the field, option or hook. Only what this repository registers is listed.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import python_page
import rlhf_distill
import rlhf_dpo
import rlhf_kto
import typer
from pydantic.fields import FieldInfo
from python_page import WIDTH, joined, table

from rlhf_core import cli, contracts, installed_registry, plugins
from rlhf_core.cli import extensions
from rlhf_core.config import Component, Options, TrainerConfig, fields
from rlhf_core.config.toml import to_value
from rlhf_core.contracts import MODEL, TRAINER, Kind
from rlhf_core.contracts.models import Head
from rlhf_core.mesh import AXES, RULES
from rlhf_core.models import Architecture, Decoder, DecoderConfig, Layer, find_family
from rlhf_core.models.hf_config import EXPERT_COUNTS, DecoderFamily
from rlhf_core.models.loading import complete_table
from rlhf_core.models.lora import linear_modules
from rlhf_core.models.params import paths
from rlhf_core.models.weights import tensor_names
from rlhf_core.plugins import Host, hooks
from rlhf_core.plugins.component import RegistryEntry

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/reference"
NOTE = "*Written by [generate.py](../generate.py) from the code; change it there.*"
MARKS = ("<!-- fields: written by docs/generate.py -->", "<!-- end of fields -->")
KINDS = {
    "trainer": "what a stage's `trainer` names: a `Trainer`, its configuration and a function that runs it",
    "pairwise loss": "a value per pair, from the scores of chosen and rejected replies: `loss` of a reward stage",
    "dpo loss": "a value per pair, from log-probabilities of chosen and rejected completions: `loss` of a DPO or "
    "online DPO stage",
    "kto loss": "a value per completion, from its log-probabilities, its label and an estimate of the KL: `loss` of a "
    "KTO stage",
    "divergence": "a term per vocabulary id, from the log-probabilities of student and teacher: `divergence` of a "
    "distillation stage",
    "policy loss": "a value per token, from log-probabilities and advantages: `loss` of a GRPO stage",
    "advantage": "advantages of groups of completions, from their rewards: `advantage` of a GRPO stage",
    "layer": "a decoder's layer, a class: what [a family with its own](../how-to/add_a_model_family.md) names",
    "attention": "attention within rows: `attention` of any stage",
    "experts": "how accelerators compute the products of a mixture of experts: no field, `pallas` is taken where it is "
    "installed",
    "sampler": "what samples completions: `sampler` of a GRPO, online DPO or distillation stage",
    "reward": "a number per completion: an entry of `rewards` of a GRPO or online DPO stage",
    "environment": "what a policy talks with over several turns, an object per episode: `environment` of a GRPO stage",
    "model": "a family of models, found by the `model_type` of config.json: a `ModelFamily`, whose models subclass "
    "`Definition`; `rlhf_families.nnx_family` makes one of a [flax module](../../examples/flax/README.md)",
    "dataset": "rows by index: the `name` in a table `train_data` or `eval_data`",
    "logger": "an object with hooks, called while its stage runs: an entry of `logger`",
    "action": "what happens besides a trainer's updates where a field of every config is set: `previews`",
    "optimizer": "a gradient transformation for a learning rate: `optimizer` of any stage",
}

GROUPS = """```toml
[project.entry-points."rlhf.policy_loss"]
tanh = "my_package.losses:Tanh"      # loss = { name = "tanh" }

[project.entry-points."rlhf.kind"]   # a kind of the package's own, whose group is rlhf.value_loss
value_loss = "my_package:VALUE_LOSS"

[project.entry-points.rlhf]          # a module with other hooks than rlhf_register
my_package = "my_package.hooks"
```"""

ADDED = """A package adds a command with an entry point of the group `rlhf.commands`, such as
`report = "rlhf_report.commands:report"`: a function whose annotated parameters typer reads, or a `typer.Typer`.
`rlhf --help` imports its module, so import what is slow within the function."""

PYTHON = """What trainers, losses, rewards and loggers are written with. These names are promised:
[CONTRIBUTING](../../CONTRIBUTING.md#compatibility) says what that means. Shapes are in brackets, [rows, time];
log-probabilities are in nats. Parameters, shapes and errors are in the docstrings."""


MODELS = """The `model_type` of a config.json chooses its family; another one is an error that lists these. Of a
checkpoint that holds more, such as `qwen3_5`, `gemma4` or `mistral3`, it is that of its `text_config`; the text
models of Qwen2-VL and Qwen2.5-VL are a `qwen2`, those of Qwen3-VL a `qwen3`. All models are trained
and scored in packed rows, sampled, and exported. The lists below are what the families' definitions say of a model
with the defaults of its class in transformers: first what all have in common, then where they differ.
[Hugging Face](../how-to/hugging_face.md#models-in) has what files may hold, and
[Add a model family](../how-to/add_a_model_family.md) how to describe another one."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
METHODS = {
    "with_lora": "LoRA adapters",
    "decode_groups": "one cache of a prompt for all its completions",
    "extend": "a cache that the turns of a conversation continue",
    "hidden_at": "a last layer that is computed where rewards are read",
}
"""What the optional methods of a definition are for."""


def pages() -> dict[str, str]:
    """{path below docs/reference: text}. Raises SystemExit where a distribution of this repository is not installed."""
    host = plugins.load()
    written = {
        "components.md": components_page(host),
        "commands.md": commands_page(),
        "python.md": page(["# Python", NOTE, PYTHON, *python_page.parts()]),
        "models.md": page(["# Model families", NOTE, MODELS, *model_parts()]),
    }
    return written | {name: between_marks(name, text) for name, text in field_parts(host).items()}


def between_marks(name: str, text: str) -> str:
    """A page of docs/reference with its fields written anew."""
    before, start, rest = (TARGET / name).read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise SystemExit(f"docs/reference/{name} lacks the lines {MARKS[0]} and {MARKS[1]}")
    return f"{before}{start}\n\n{text}\n{end}{after}"


def ours(host: Host) -> dict[str, dict[str, list[str]]]:
    """{distribution: {kind: [names]}} of this repository."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    # rlhf-suite has no code; rlhf-verifiers is installed by itself.
    names = [each["name"] for each in projects if "entry-points" in each and each["name"] != "rlhf-verifiers"]
    infos = extensions.with_commands(host.plugins)
    loaded = {info.distribution: dict(info.components) for info in infos if info.state == "loaded"}
    if missing := [name for name in names if name not in loaded]:
        raise SystemExit(f"not installed, or failed to load: {', '.join(missing)}; run make env")
    return {name: loaded[name] for name in names}


# Fields


def field_parts(host: Host) -> dict[str, str]:
    """{path below docs/reference: the fields of every trainer, or those that one of ours adds}."""
    aliases = ", ".join(f"`{alias}` is `{name}`" for alias, name in TrainerConfig.aliases().items())
    shared = [
        field_table(TrainerConfig, TrainerConfig.model_fields, ""),
        *nested_tables(TrainerConfig, TrainerConfig.model_fields, ""),
        f"Other spellings: {aliases}.",
    ]
    names = [name for components in ours(host).values() for name in components.get("trainer", [])]
    trainers = {
        f"trainers/{name}.md": page(trainer_fields(host.registry.get(TRAINER, name).config))
        for name in names
        if own_fields(host.registry.get(TRAINER, name).config)
    }
    return {"config.md": page(shared), **trainers}


def own_fields(config: type[TrainerConfig]) -> list[str]:
    """The fields that a trainer adds or changes."""
    shared = {row.name: row for row in fields(TrainerConfig)}
    return [
        row.name for row in fields(config) if row.name in config.model_fields and shared.get(row.name) != row
    ]


def trainer_fields(config: type[TrainerConfig]) -> Iterator[str]:
    """The fields that a trainer adds or changes; the flat names; what it does not use."""
    yield field_table(config, own_fields(config), "../")
    yield from nested_tables(config, own_fields(config), "../")
    own = {name: path for name, path in config.aliases().items() if name not in TrainerConfig.ALIASES}
    if short := [f"`{name}` is `{path}`" for name, path in own.items()]:
        yield "Short names: " + ", ".join(short) + "."
    for field, instead in config.unused_fields().items():
        yield f"`{field}` has no effect here: {instead}."


def field_table(config: type[Options], names: Iterable[str], root: str) -> str:
    """A table of fields. root: from the page to docs/reference."""
    docs = {row.name: row for row in fields(config)}
    rows = []
    for name in names:
        field, doc = config.model_fields[name], docs[name]
        known = doc.type if field.is_required() is False else f"{doc.type}, required"
        rows.append((f"`{name}`", linked(known, root) + doc.bounds, default(doc.default), doc.description))
    return table(("field", "type", "default", "meaning"), rows)


def nested_tables(config: type[Options], names: Iterable[str], root: str) -> Iterator[str]:
    """A table for each field that holds one, in the order of the fields."""
    for name in names:
        for inner in option_classes(config.model_fields[name]):
            component = issubclass(inner, Component)
            said = paragraphs(inner) if inner.__doc__ else []
            yield f"### {name}"
            yield " ".join([*said, "Besides the component's own options:" if component else ""])
            keys = [key for key in inner.model_fields if not (component and key == "name")]
            yield field_table(inner, keys, root)


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


def linked(words: str, root: str) -> str:
    """Link the name of a kind to its components."""
    for name in KINDS:
        if re.fullmatch(rf"(list of )?{name}", words):
            return words.replace(name, f"[{name}]({root}components.md#{name.replace(' ', '-')})")
    return words


# Components


def components_page(host: Host) -> str:
    found = ours(host)
    parts = [
        "# Components",
        NOTE,
        "What a pipeline can name, by kind, with its options; and the [hooks](#hooks). `rlhf plugins` lists what is "
        "installed. A package adds to a kind with an entry point in its group, in `pyproject.toml`; the component is "
        "imported when it is first asked for:",
        GROUPS,
        'A file or object does so with the hook `rlhf_register`: `registry.add(POLICY_LOSS, "name", thing)`, with the '
        "kind's constant, of `rlhf_core` or of the plugin that declares it. The docstrings of `rlhf_core/contracts` "
        "and of the plugin say what a component of each kind takes and returns.",
    ]
    parts.append(table(("kind", "constant", "group", "a component is"), kind_rows()))
    for kind in declared().values():
        parts.append(f"## {kind.name}")
        alike: dict[tuple[str, ...], list[str]] = {}
        for distribution, components in found.items():
            for name in components.get(kind.name, []):
                said = tuple(component(distribution, host.registry._entry(kind, name)))
                alike.setdefault(said, []).append(f"**`{name}`**")
        for (first, *rest), names in alike.items():
            parts += [f"{', '.join(names)}: {first}", *rest]
    return page([*parts, *hook_parts()])


def declared() -> dict[str, Kind[Any]]:
    """{constant: kind} of the contracts, and of the plugins that have kinds of their own."""
    homes = (contracts, contracts, rlhf_dpo, rlhf_kto, rlhf_distill)
    return {name: value for home in homes for name, value in vars(home).items() if isinstance(value, Kind)}


def kind_rows() -> list[tuple[str, str, str, str]]:
    return [
        (
            f"[{kind.name}](#{kind.name.replace(' ', '-')})",
            f"`{constant}`",
            f"`rlhf.{kind.name.replace(' ', '_')}`",
            KINDS[kind.name],
        )
        for constant, kind in declared().items()
    ]


def component(distribution: str, entry: RegistryEntry) -> Iterator[str]:
    """Describe a component and its options, without its name, since several may differ only in that."""
    if entry.kind == TRAINER:
        outputs = ", ".join(f"`{name}` ({kind})" for name, kind in entry.thing.outputs.items())
        about = (
            f"{paragraphs(entry.thing.config)[0]} Output: {outputs}; [its page](trainers/{entry.name}.md)."
        )
        yield f"{about} *{distribution}*"
        return
    texts = paragraphs(entry.thing) if inspect.isroutine(entry.thing) or inspect.isclass(entry.thing) else []
    yield " ".join([texts[0] if texts else f"Reads `{', '.join(entry.thing.name)}`.", f"*{distribution}*"])
    yield from texts[1:]
    if entry.options:
        parameters = inspect.signature(entry.thing).parameters
        rows = []
        for name, model in entry.options.items():
            (option,) = fields(model)
            given = parameters[name].default
            shown = "required" if given is inspect.Parameter.empty else default(given)
            rows.append((f"`{name}`", option.type + option.bounds, shown))
        yield table(("option", "type", "default"), rows)


# Models


def architectures() -> dict[str, Architecture]:
    """The descriptions of decoders, by model_type, those of rlhf-families too."""
    registry = installed_registry()
    families = [registry.get(MODEL, name) for name in registry.names(MODEL)]
    return {
        name: rules
        for family in families
        if isinstance(family, DecoderFamily)
        for name, rules in family.architectures.items()
    }


def model_parts() -> Iterator[str]:
    """What all families have in common, and a table of what differs."""
    facts = {name: family_facts(name, rules) for name, rules in architectures().items()}
    columns = list(next(iter(facts.values())))
    alike = {column for column in columns if len({row[column] for row in facts.values()}) == 1}
    first = next(iter(facts.values()))
    yield "\n".join(f"- {column}: {first[column]}" for column in columns if column in alike)
    differing = [column for column in columns if column not in alike]
    rows = [(f"`{name}`", *(row[column] for column in differing)) for name, row in facts.items()]
    yield table(("model_type", *differing), rows)
    yield "## Linear layers with adapters"
    yield 'What `lora.targets = "all-linear"` names, and what a name of these adapts. Routers and experts take none.'
    groups: dict[str, list[str]] = {}
    for name, rules in architectures().items():
        shapes = small_model(name, rules).abstract_params()
        words = dict.fromkeys(f"`{module.rpartition('.')[2]}`" for module in linear_modules(shapes))
        groups.setdefault(", ".join(words), []).append(f"`{name}`")
    yield table(("families", "linear layers"), [(", ".join(names), words) for words, names in groups.items()])


def small_model(name: str, rules: Architecture, head: Any = "lm") -> Decoder:
    """A model of a family with the defaults of its class, and one of each kind of layer, small."""
    sizes: dict[str, Any] = {"model_type": name, **SMALL}
    if rules.layers:
        sizes["layer_types"] = [*rules.layers, "full_attention"] * 3
    found: Any = find_family(name).define(complete_table(sizes, None, None), head)
    return found


def family_facts(name: str, rules: Architecture) -> dict[str, str]:
    """{what: how a family has it}, derived from its definition."""
    model = small_model(name, rules)
    config = model.config
    stacks = [stack.config for stack in config.stacks.values()]
    mixers = list(dict.fromkeys((of.layer or Layer).about for of in stacks))
    if any(of.sinks for of in stacks):
        mixers[mixers.index("attention")] = "attention with sinks"
    windows = {"windows" if window else "no windows" for of in stacks for window in of.windows}
    if windows == {"windows", "no windows"}:
        windowed = "in some layers"
    elif "windows" in windows:
        windowed = "in all layers"
    else:
        windowed = "none" if rules.layer_types is None or rules.layers else "where set"
    mlps = ["dense"] if any(not of.experts for of in stacks) else []
    if any(of.experts for of in stacks):
        mlps += ["experts", "shared expert"] if config.shared_size else ["experts"]
    elif any(field in rules.defaults for field in EXPERT_COUNTS):
        mlps.append("experts where set")
    heads = [head for head in get_args(Head) if small_model(name, rules, head).abstract_params()]
    logical = {axis for _, leaf in paths(model.logical_axes()) for axis in leaf}
    axes = {axis for name in logical & RULES.keys() for axis in RULES[name]}
    shared = model.tensor_parallel
    return {
        "class": f"`{rules.causal_lm}`",
        "tokens are mixed by": ", ".join(mixers),
        "sliding windows": windowed,
        "MLP": ", ".join(mlps),
        "experts in files": " or ".join(expert_layouts(model)),
        "head": "tied" if config.tied else "its own",
        "`expert`": "divides experts" if "experts" in logical else "as `fsdp`",
        "`attention`": 'all but `"cudnn"`' if config.sinks or config.attention_softcap else "all",
        "`tensor` while sampling": "yes" if shared is not None and shared.divides > 1 else "no",
        "further tensors carried": "layers for speculative decoding" if carries_layers(config) else "",
        "heads": " and ".join({"lm": "language model", "score": "reward"}[head] for head in heads),
        "parameters are sharded over": ", ".join(f"`{axis}`" for axis in AXES if axis in axes),
        "in all families": ", ".join(each for method, each in METHODS.items() if model.has(method)),
    }


def expert_layouts(model: Decoder) -> Iterator[str]:
    """How the tensors of experts may be stored."""
    found = set()
    for fused in (False, True):
        names = tensor_names(replace(model, config=replace(model.config, fused_experts=fused))).values()
        experts = {name for each in names for name in each.reshape(-1) if ".experts." in name}
        found |= {"one by one" if re.search(r"experts\.\d", name) else "fused" for name in experts}
    yield from sorted(found, reverse=True)


def carries_layers(config: DecoderConfig) -> bool:
    """Whether tensors of layers that predict further tokens may lie in the files."""
    return bool(config.carried) or "num_nextn_predict_layers" in architectures()[config.model_type].defaults


# Commands and hooks


def commands_page() -> str:
    group: Any = typer.main.get_command(cli.app)
    group.list_commands(None)  # with those of the distributions
    codes = paragraphs(cli.main)[0].removeprefix("Exit codes: ").rstrip(".")
    parts = [
        "# Commands",
        NOTE,
        f"Exit codes: {codes}. Problems are one line each, on standard error.",
        ADDED,
    ]
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
    kinds = get_args(annotation) or (annotation,)
    named = "|".join(kinds) if isinstance(kinds[0], str) else {int: "N", float: "X"}.get(kinds[0], "TEXT")
    value = "" if flag.is_flag else f" {flag.metavar or named}"
    given = "" if flag.default is None or flag.is_flag else default(flag.default)
    return f"`{', '.join(flag.opts)}{value}`", flag.help or "", given


def hook_parts() -> Iterator[str]:
    yield "## Hooks"
    for text in inspect.cleandoc(hooks.__doc__ or "").split("\n\n"):
        yield f"```text\n{inspect.cleandoc(text)}\n```" if text.startswith(" ") else joined(text)
    yield (
        "A plugin is a module, an object or a file whose functions carry `@hookimpl` from `rlhf_core`; a logger is an "
        "object with such methods."
    )
    for name, hook in vars(hooks).items():
        if name.startswith("rlhf_"):
            signature = str(inspect.signature(hook)).replace("'", "").replace(" -> None", "")
            yield f"### {name}"
            yield f"`{name}{signature}`"
            yield from paragraphs(hook)


# Markdown


def paragraphs(thing: Any) -> list[str]:
    """The paragraphs of a docstring, each as one line."""
    return [joined(text) for text in (inspect.getdoc(thing) or "").split("\n\n")]


def default(value: Any) -> str:
    """A value as a TOML file would have it."""
    if value is None:
        return "none"
    if isinstance(value, Mapping) and set(value) != {"name"}:
        return "see below"
    return f"`{to_value(value)}`"


def page(parts: Iterable[str]) -> str:
    """Paragraphs wrapped; headings, tables and blocks as they are."""
    return "\n\n".join(each if each[0] in "#|`-" else wrapped(each) for each in parts if each) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(joined(text), WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    for file, text in pages().items():
        (TARGET / file).write_text(text, encoding="utf-8")
        print(TARGET / file)
